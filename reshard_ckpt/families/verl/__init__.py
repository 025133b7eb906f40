"""verl: its FSDP checkpoint manager through this library."""
