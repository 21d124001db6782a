"""The streaming quantizer: a model goes through memory a decoder layer at a time, whatever its size.

decoder.py   transformers' own decoder, a layer at a time         reading.py   a layer's tensors from the shards
"""
