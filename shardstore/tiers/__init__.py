"""Where bytes live: no torch."""
