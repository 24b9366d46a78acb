"""Training scripts, run as they are: on a simulated GPU that answers to ``cuda``, with simulated time.

`run_script` starts a process for one rank of the script (`process`, on the other side) and returns its captured step.
"""
