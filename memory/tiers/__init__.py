"""Page stores behind the prefix cache: host memory and disk.

The package owns copies of pages, their files and the disk's health. It does not know which prefixes
are worth keeping. Read disk_tier.py and host_tier.py first.
"""
