"""Traces under plans, derived from few captures: exactly, without running PyTorch again.

What a plan does to a step, row by row of its trace (`autosac.integrations`):

1. *Forward.* A unit runs the same operators. What it makes is let go where the program drops it, unless the plan
   keeps it; what it only reads is held until its backward is through, if the recomputation needs it.
2. *Recomputation.* The first tensor that the backward asks for makes the unit run again the operators that lead from
   what is kept to all that the backward will ask for, in the forward's order, and no others. Each result ends with
   its last use, or when the backward has used it.
3. *Backward.* The engine runs the same nodes in the same order: they are those of the forward, by sequence numbers.
4. *What is kept.* The forward makes a detached alias of each tensor that a kept operator returns in memory of its
   own. It holds it to the end of the forward, and, if the recomputation needs it, until its last use there or in the
   backward. A collective that is kept is not waited for again. Memory that is changed in place is kept by all that
   write to it, or by none (else: not derived).

5. *Gathering.* FSDP gathers what a recomputation reads and has been let go of before the first operator that reads it,
   or, where none does, in its own hook in the backward (`gathers`).

1 to 3 need no rules here: they are in any capture in which the unit keeps nothing, a *template*. That a unit
recomputes changes nothing inside of another, so captures of different units are put together unit by unit (`mix`); 4 is
a set of edits of that (`keep`, `edits`), and so is 5. Both check what they rely on and raise NotDerivableError where it does
not hold: rows outside of the units that depend on checkpointing, kept aliases of recomputed memory, recomputation by the job
itself, a first step that differs from the recorded one inside a unit.

`Deriver` derives traces; `Derivation` simulates the steps under plans for a search, capturing what cannot be derived.
"""

from __future__ import annotations

from autosac.derivation.agreement import UncheckpointedStep
from autosac.derivation.captures import CaptureSource, Derivation
from autosac.derivation.deriver import Deriver
from autosac.derivation.steps import NotDerivableError

__all__ = ["CaptureSource", "Derivation", "Deriver", "NotDerivableError", "UncheckpointedStep"]
