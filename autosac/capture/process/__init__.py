"""Captures in processes of their own: server, worker, requests, and the store of what was captured before."""
