"""What is traced into the user's step: collectives and nothing else."""
