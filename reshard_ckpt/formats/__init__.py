"""Files of other libraries: each format is a catalog over its own files, and some are written too."""
