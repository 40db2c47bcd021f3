"""Start agents on hosts: on this machine, and with ssh, Slurm and Ray."""
