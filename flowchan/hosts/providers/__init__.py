"""Start agents on hosts: on this machine, and through ssh, Slurm and Ray."""
