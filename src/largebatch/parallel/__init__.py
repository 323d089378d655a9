"""How do gradients travel? All-reduce algorithms, a hook for DistributedDataParallel, and a cluster on paper."""
