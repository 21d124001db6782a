"""An estimate, for reading."""

import shlex
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from assemble.fit.cache import kv_dtype, state_dtypes
from assemble.fit.cards import KNOWN_CARDS, MIB
from assemble.fit.estimate import Fit
from assemble.fit.settings import GIB, ServeSettings
from assemble.fit.suggestions import Suggestion
from assemble.fit.terms import Term

FITTED_MARK = "~"
PIPE_WIDTH = 120
CONTEXTS = (8192, 32_768, 65_536, 131_072, 262_144)


def print_fit(found: Fit, *, mean_context: int | None, cost: float | None, sources: bool) -> None:
    """Prints one estimate.

    Args:
        found: The estimate.
        mean_context: Of agents, in tokens.
        cost: Dollars a million tokens.
        sources: Also say where each term was read.
    """
    console = _console()
    card = found.cards.card
    derived = "" if card.measured else ", derived from nvidia-smi's"
    console.print(
        Text(
            f"{found.model.name} on {found.cards} ({_gib(card.usable_bytes)} GiB by CUDA{derived}), vLLM {found.settings.vllm}"
        )
    )
    console.print(_terms_table(found))
    console.print(Text(f"{FITTED_MARK} fitted to published measurements, or scaled; the rest is arithmetic (--sources)", "dim"))
    for line in _cache_lines(found, mean_context):
        console.print(Text(line), soft_wrap=True)
    if cost is not None:
        console.print(
            Text(f"cost      ${cost:,.3f} a million tokens at this rate and speed, idle time and cold starts not counted")
        )
    console.print()
    _print_verdict(console, found)
    if sources:
        console.print()
        for term in found.terms:
            console.print(Text(f"{term.name}: {term.source}"), soft_wrap=True)


def _terms_table(found: Fit) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=True)
    table.add_column("a card")
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("")
    inside = [term for term in found.terms if term.inside_budget]
    for term in (t for t in inside if t.weights):
        _row(table, term)
    table.add_row("weights", _gib(found.weights_bytes), f"{found.weights_bytes / 1e9:.2f} GB", style="bold", end_section=True)
    for term in (t for t in inside if not t.weights):
        _row(table, term)
    share = f"{found.settings.gpu_memory_utilization:g} of {_gib(found.cards.card.usable_bytes)} by --gpu-memory-utilization"
    table.add_row("budget", _gib(found.budget_bytes), share, style="bold")
    needed = f"{_gib(found.needed_bytes)} needed to start"
    table.add_row("left for the cache", _gib(found.pool_bytes), needed, style="bold", end_section=True)
    table.add_row("outside the budget", _gib(found.outside_bytes), "what utilization must leave free", style="bold")
    for term in (t for t in found.terms if not t.inside_budget):
        _row(table, term)
    return table


def _row(table: Table, term: Term) -> None:
    table.add_row(f"{term.name}{' ' + FITTED_MARK if term.fitted else ''}", _gib(term.nbytes), term.explanation)


def _cache_lines(found: Fit, mean_context: int | None) -> list[str]:
    cache, settings = found.geometry, found.settings
    kv, (conv, recurrent) = kv_dtype(found.model, settings), state_dtypes(found.model, settings)
    draft = f", and {cache.token_bytes * cache.draft_layers:,} for the MTP head's own" if cache.draft_layers else ""
    lines = [
        f"KV        {found.kv_bytes_per_token:,} bytes a token a card in {kv}: {cache.attention_layers} layers with full "
        f"attention, {cache.token_bytes:,} each{draft}"
    ]
    if cache.linear_layers:
        lines += [
            f"state     {cache.state_bytes / MIB:.2f} MiB in each of {cache.linear_layers} linear layers ({conv} convolution, "
            f"{recurrent} recurrence), {cache.states} to a request",
            f"blocks    of {cache.block_tokens:,} tokens, so that one holds a state: {found.num_blocks:,} of "
            f"{cache.block_bytes / MIB:.2f} MiB; a request takes {cache.state_blocks} for states, then one each "
            f"{cache.block_tokens:,} tokens",
        ]
    if not found.num_blocks:
        return lines
    at = found.max_model_len
    lines += [
        f"pool      {found.pool_tokens:,} tokens by vLLM's count at --max-model-len {at:,} "
        f"({cache.bytes_per_token(at):,.0f} bytes a token, states included)",
        f"longest   {found.max_context:,} tokens in one request (the model's own limit: {found.model.max_len:,})",
    ]
    contexts = sorted({at, *(c for c in CONTEXTS if c < at)})
    lines.append("at once   " + ", ".join(f"{found.concurrency(c):.1f} of {c:,}" for c in contexts) + " tokens each")
    seqs = settings.max_num_seqs or 1
    if seqs > 1 and found.concurrency(at) < seqs:
        lines.append(_shared(found, seqs))
    if mean_context:
        agents = found.agents(mean_context)
        lines.append(
            f"agents    {agents:.0f} of {mean_context:,} tokens on average: half of the pool over the mean. It comes out high "
            "(34 where 24 was best): sweep downward"
        )
    return lines


def _shared(found: Fit, seqs: int) -> str:
    cache = found.geometry
    share = cache.longest(found.num_blocks // seqs, found.max_model_len)
    if share:
        return f"shared    {seqs:,} requests at a time (--max-num-seqs) have {share:,} tokens each: they share the pool"
    most = found.num_blocks // (cache.state_blocks + 1)
    return f"shared    {seqs:,} requests at a time (--max-num-seqs) are more than the pool holds: {most:,}, however short"


def _print_verdict(console: Console, found: Fit) -> None:
    slack = abs(found.slack_bytes)
    if found.fits:
        tight = " - tight: less than the fitted terms are known to, so vLLM's own startup decides" if found.tight else ""
        console.print(Text.assemble(("fits", "bold green"), f", {_gib(slack)} GiB a card to spare{tight}"), soft_wrap=True)
    else:
        console.print(Text.assemble(("does not fit", "bold red"), f". {found.reason}"), soft_wrap=True)
    if found.suggestions and (not found.fits or found.tight):
        console.print(Text("what each change frees a card, mildest first:"))
        for suggestion in found.suggestions:
            console.print(Text(_suggestion(suggestion)), soft_wrap=True)
    if found.remedy is not None:
        tight = " (tight)" if found.remedy.tight else ""
        console.print(
            Text(f"together, this fits{tight}: {' '.join(changed_flags(found.settings, found.remedy.settings))}"),
            soft_wrap=True,
        )
    elif not found.fits:
        console.print(Text(_hopeless(found)), soft_wrap=True)
    if not found.fits and found.model.quantized:
        whole = f"python -m assemble serve {shlex.quote(found.model.name)}"
        console.print(Text(f"shipped profiles have such flags together; which of them fit: {whole}"), soft_wrap=True)


def _hopeless(found: Fit) -> str:
    smaller = "" if found.model.quantized else ", or quantize it: python -m quantize run"
    return (
        "Nothing that was left to vLLM makes it fit with what you gave: change that, or use a larger card or more of "
        f"them{smaller}."
    )


def _suggestion(s: Suggestion) -> str:
    return f"  {_gib(s.frees_bytes):>6} GiB  {s.flag}  ({s.text})"


def changed_flags(before: ServeSettings, after: ServeSettings) -> list[str]:
    """What to write on `vllm serve`'s command line for what differs between two filled settings."""
    flags = []
    for name in before.__dataclass_fields__:
        value = getattr(after, name)
        if value == getattr(before, name) or name == "max_cudagraph_capture_size":
            continue
        flags.append(_written(name, value))
    return flags


def _written(name: str, value: object) -> str:
    flag = "--" + name.replace("_", "-")
    special = {
        "flashinfer_workspace_bytes": f"VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE={value}",
        "cudagraph_mode": f'--compilation-config \'{{"cudagraph_mode":"{value}"}}\'',
        "num_speculative_tokens": "(without --speculative-config)",
    }
    if name in special:
        return special[name]
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {value}"


def print_comparison(fits: Sequence[Fit]) -> None:
    """Prints several checkpoints side by side."""
    console = _console()
    first = fits[0]
    console.print(Text(f"on {first.cards}, vLLM {first.settings.vllm}, utilization {first.settings.gpu_memory_utilization:g}"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("a card")
    for found in fits:
        table.add_column(found.model.name.rstrip("/").rpartition("/")[2], justify="right")
    rows: dict[str, Callable[[Fit], str]] = {
        "weights, GiB": lambda f: _gib(f.weights_bytes),
        "left for the cache, GiB": lambda f: _gib(f.pool_bytes),
        "KV bytes a token": lambda f: f"{f.kv_bytes_per_token:,} ({kv_dtype(f.model, f.settings)})",
        "block, tokens": lambda f: f"{f.block_tokens:,}",
        "pool, tokens": lambda f: f"{f.pool_tokens:,}",
        "longest request": lambda f: f"{f.max_context:,}",
        "at --max-model-len": lambda f: f"{f.max_model_len:,}",
        "of these at once": lambda f: f"{f.concurrency(f.max_model_len):.2f}",
        "verdict": lambda f: ("tight" if f.tight else "fits") if f.fits else "does not fit",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(found) for found in fits))
    console.print(table)


def print_cards() -> None:
    """Prints the known cards."""
    table = Table("card", "GB", "nvidia-smi MiB", "CUDA MiB", "", "sm", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for card in KNOWN_CARDS:
        how = "measured" if card.measured else "derived"
        table.add_row(card.name, str(card.gigabytes), f"{card.smi_mib:,}", f"{card.usable_mib:,}", how, str(card.sm))
    _console().print(table)


def _console() -> Console:
    """A terminal's own width; into a pipe or file, wide enough that nothing wraps."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(file=sys.stdout, highlight=False, width=width)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"
