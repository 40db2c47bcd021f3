"""Train data-parallel with the members of a group."""
