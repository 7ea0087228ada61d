"""What is done with a job: prepare, check, evaluate."""
