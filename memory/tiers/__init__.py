"""Page stores behind the prefix cache: host memory and disk.

It owns copies of pages, their files and the disk's health. It does not know which prefixes are
worth keeping. Begin with disk_tier.py and host_tier.py.
"""
