"""A Ray Serve application: replicas that are `serve run` processes behind Ray Serve's own proxies.

app.py builds it; only app.py and router.py import Ray. What a replica tells, and how one is chosen
from that, know nothing of Ray.
"""
