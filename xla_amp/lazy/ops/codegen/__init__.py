"""One Python kernel per ATen overload, generated from the operation's schema.

A kernel finds the value numbers of its operands, looks up its `Instruction` by the specs and constants of the call,
appends a few integers to the trace, and wraps the number of the result in a new tensor.  Python is the cost of tracing,
so the source of each kernel is generated for its schema and compiled at its first call: it has no loops and no look-ups
by name.  Only the first call with new specs takes the slow path.

`schema` says what an operation takes and returns, `plan` is the slow path, `text` the kernel.
"""
