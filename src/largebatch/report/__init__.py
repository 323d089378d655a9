"""What does a person read when a study has ended? Drawn from result.json alone: records only, no torch."""
