"""Support for one foreign system in each folder. The core imports none of them: it finds them by entry points."""
