"""What does a run write to disk, and nothing else? No torch here: a report needs only this room."""
