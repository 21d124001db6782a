"""How good is what was written, and will its head still draft? Measured from the written files, before anyone serves them.

evaluation.py the whole thing    command.py `python -m quantize evaluate`

    rows.py         held-out text                       dequantize.py  numbers of a file into BF16
    weights.py      a checkpoint read back, by layers   matrix.py      one stored matrix, or the experts' of a layer
    simulation.py   FP8 activations and KV cache        walk.py        source and checkpoint side by side
    modules.py      error of a matrix                   changes.py     what should be the source's and is not
    distance.py     error of predictions                outliers.py    what stands out
    mtp*.py         the MTP head                        tasks/         benchmarks against a server
    gates.py  report.py  terminal.py  markdown.py  plots.py  comparison.py
"""
