"""Which configuration of a job is the fastest: `autosac search`.

    space, job -> legal layouts -> bounds -> best-first -> evaluations -> best job, table, report

A *layout* is everything of a configuration but its checkpointing: degrees of parallelism, microbatch, pipeline schedule,
FSDP's settings. One evaluation of a layout answers for all ways of checkpointing it. `engine` takes layouts in the order of
a lower bound of their time, makes bounds tighter where that pays (`bounds`, `sheets`), evaluates what is left, and stops
when no bound is below the best that was found: then the best is proven, within the space.
"""
