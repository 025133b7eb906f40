"""Frameworks that save and load through this library. Each has a module, which imports the framework only when it is used."""
