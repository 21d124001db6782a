"""The streaming quantizer: a model goes through memory a decoder layer at a time, whatever its size.

engine.py       the loop: read, run, pack, write         decoder.py     transformers' own layers, one at a time
reading.py      tensors from the source's shards         calibration.py runs a layer on all rows, measures its inputs
writing.py      packed tensors to the shards             activations.py the hidden states between two layers
modules.py      which tensors a module becomes           faster/        functions of layers, with the same bits
packing.py      weights to NVFP4 and FP8                 journal.py     what a killed run goes on from
sweep.py        block scales by squared error            ranks.py       several processes, and worker.py what the others do
e2m1.py         rounding to four bits                    spreading.py   parts of a tensor over the cores
pending.py      packed tensors that are still to be checked
"""
