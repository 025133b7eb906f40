"""What is said of a checkpoint without loading it: verified, compared, measured."""
