"""`search`: the errors of a training step under a plan, on each front, and the result as a policy file.

A front gives a `SearchProgram`: its `Candidate` list and a function that measures the errors of one plan on one batch.
`search` finds the plan; `fronts.SearchResult` shows it and writes it as a policy file.

    program.candidates                      what could run low
    program.evaluate(plan, batch)           {"loss": relative error, "gradients": relative error}
    found = search(program, budget={"loss": 1e-3})
    found.plan                              names of the candidates that run low
"""

from xla_amp.planning.planner import Candidate as Candidate
from xla_amp.planning.planner import Found as Found
from xla_amp.planning.planner import Plan as Plan
from xla_amp.planning.planner import SearchProgram as SearchProgram
from xla_amp.planning.planner import search as search
from xla_amp.planning.plans import from_records as from_records
from xla_amp.planning.plans import policy as policy
from xla_amp.planning.plans import to_toml as to_toml
