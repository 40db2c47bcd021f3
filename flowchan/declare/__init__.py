"""The declaration of a graph. Nothing here runs."""
