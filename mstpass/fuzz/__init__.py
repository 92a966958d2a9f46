"""A fuzzer: random models and losses, compiled with random options, held to what mstpass promises.

    case.py      a case as plain frozen data, its choices, and the case of a seed and a number
    layers.py    what layers and (templates.py) losses, ops and norms are, as tables of source
    render.py    a case as short Python source; what is printed is what ran
    program.py   the model and the inputs of that source; its values, held to float64
    compiled.py  the program compiled: its rewritten graphs op by op (fast), or by Inductor
    graphs.py    the rewritten graphs against the joint graph; a failure injected into a pass
    plans.py     plans against their promises; checks.py runs a case and asks all oracles
    reduce.py    the smallest case that fails in the same way, as a test; what a campaign found
    worker.py    one process that runs cases; campaign.py runs many, and keeps their results

Why not Hypothesis, which shrinks well: it draws a case as a sequence of choices that only the
version of the strategy that drew it can read. A failure here is a record of fields instead, which
can be stored, read, edited and run after the generator has changed; a seed and a number name a
case in any order, on any number of workers; and cases are drawn evenly, where Hypothesis
prefers small ones and drops what looks alike. Shrinking needs no more than forty lines, because
every field lists its values from the plainest on.
"""
