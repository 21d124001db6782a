"""The benchmark: `vllm bench serve` over concurrencies and categories of prompts, and the tables that come of it.

vLLM's own load generator makes the load and takes the times; what is here drives it, collects its results, and says where more
concurrency stops paying (the knee).
"""
