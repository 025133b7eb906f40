"""Coverage-guided fuzzing of all that reads bytes from elsewhere: ``python -m tests.fuzz --seconds 60``, or ``make fuzz``."""
