"""The version of flowchan. The build reads it from here; reading the metadata of the installation would
take a sixth of an agent's start."""

VERSION = "0.1.0"
