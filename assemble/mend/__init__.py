"""Mends a checkpoint without a model: splice (the MTP head) and repair (everything that files and headers allow).

diagnose -> plan -> execute -> verify:

- `found` reads what is there, however broken; `draft` is the checkpoint to be, which starts as what was found;
- `files`, `head`, `values`, `modules`, `tensors`, `configs`, `ignore` hold the repairs, each one small function, listed in
  `repairs`: it looks for one kind of fault, changes the draft, and says what is wrong and what will be done, or why nothing
  can be;
- `layout` puts the draft's tensors into numbered shards so that as few as possible are rewritten;
- `execute` makes the new directory, from hard links where nothing changes, and `swap` puts it under its name.
"""
