"""Functions of transformers' models that are replaced while layers are calibrated, by faster ones with the same bits.

What a layer computes decides the measured input scales, so a faster way that rounds otherwise will not do. `experts` goes
through transformers' own extension point. `delta_rule` replaces a function of a layer after it has given the same bits on an
example on this device, `convolution` one for each shape after the first input of it: so another version of transformers,
PyTorch or the GPU keeps its own. `kernels` holds what they use on a GPU, in Triton.
"""
