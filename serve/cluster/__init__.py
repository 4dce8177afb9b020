"""This package runs the ranks of one model on a Ray cluster (`serve cluster`).

Ray only chooses machines and keeps processes alive: replica.py holds the ranks of one model, each
an actor (rank_actor.py) whose child process is `serve run`. Requests, steps and tokens never pass
through Ray. ray_cluster.py alone imports it, and rank_actor.py where it runs inside Ray.
"""
