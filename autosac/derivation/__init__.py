"""Traces under plans, derived from few captures: exactly, without running PyTorch again.

What `torch.utils.checkpoint` (without reentrant autograd) does to a step, row by row of its trace:

1. *Forward.* A checkpointed module runs the same operators. Its saved tensors are replaced by empty holders
   (`_checkpoint_hook.pack_hook`), so what only autograd held ends where the program drops it. The module's inputs are held
   until its backward is through (`_CheckpointFrame.saved_args`).
2. *Recomputation.* The first unpacking of a saved tensor runs the forward once more (`unpack_hook`), up to the last tensor
   that is saved if `early_stop` (`_StopRecomputationError`); every tensor that is packed is detached, and unpacked tensors
   are let go one by one. What FSDP's hooks around the module do (the unsharding by its pre-backward hook, the resharding
   after it) is outside of the recomputation; hooks inside of it may find their work done already.
3. *Backward.* The engine runs the same nodes in the same order: they are those of the forward, by sequence numbers.
4. *What is kept* (`autosac.integrations.replay`). The forward makes a detached alias of each tensor that a kept operator
   returns and holds it (not of an argument that it changed). The recomputation returns it in place of running the operator;
   from then on it is held by whatever would have held the recomputed one, and so ends where that would have. If a unit keeps
   an operator that works in place, all that it holds is detached once more when it is returned. A collective that is kept
   is waited for as the forward's. What an early stop does not come to is let go at the end of the recomputation, last held
   first. A plan that cannot be followed, so that the module would recompute everything, is not derived.

1 to 3 need no rules here: they are in any capture in which the module recomputes everything, a *template*. That a unit
recomputes changes nothing inside of another, so captures of different units are put together unit by unit (`mix`); 4 is
a set of edits of that (`keep`). Both check what they rely on and raise NotDerivableError where it does not hold:
rows outside of the units that depend on checkpointing, kept aliases of recomputed memory, recomputation by the job itself, a
first step that differs from the recorded one inside a unit.

`Deriver` derives traces; `Derivation` simulates the steps under plans for a search, capturing what cannot be derived.
"""

from __future__ import annotations

from autosac.derivation.captures import Captures, Derivation
from autosac.derivation.deriver import Deriver
from autosac.derivation.steps import NotDerivableError

__all__ = ["Captures", "Derivation", "Deriver", "NotDerivableError"]
