"""Trains the tiny models of this folder: real (small) Qwen3.5-family language models, each with a working MTP head.

    python quantize/models/train_tiny.py OUT --kind dense --seconds 300
    python quantize/models/train_tiny.py OUT --kind moe --seconds 300

They learn the Python source text that the machine has, so that perplexity and draft acceptance are real numbers. Written
is a checkpoint as published ones are: BF16, two shards, a vision tower (untrained), the head's `mtp.*` tensors, a tokenizer
with a chat template; for a mixture of experts, fused 3-D expert tensors in the decoder and in the head.
"""

import argparse
import json
import math
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048
LIBRARIES = ("torch", "numpy", "transformers", "scipy")  # besides the standard library, where installed
MAX_CHARACTERS = 45_000_000
VALIDATION_TOKENS = 200_000
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "max_position_embeddings": 8192, "mtp_num_hidden_layers": 1, "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                        "mrope_section": [6, 5, 5], "mrope_interleaved": True},
}  # fmt: skip
MLP = {
    "dense": {"intermediate_size": 512},
    "moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
}
VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256,
          "num_position_embeddings": 64}  # fmt: skip
TOKENS = {"image_token_id": 2044, "video_token_id": 2045, "vision_start_token_id": 2046, "vision_end_token_id": 2047}
BALANCE = 0.01  # weight of the load-balancing loss of a mixture of experts


class Head(nn.Module):
    """The MTP head: from the hidden state at t (after the final norm) and the embedding of token t+1, the logits of t+2."""

    def __init__(self, library: Any, text: Any) -> None:
        super().__init__()
        hidden, eps = text.hidden_size, text.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = library.norm(hidden, eps=eps), library.norm(hidden, eps=eps)
        self.layers = nn.ModuleList([library.layer(text, text.layer_types.index("full_attention"))])
        self.norm = library.norm(hidden, eps=eps)

    def forward(self, embedding: torch.Tensor, hidden: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Hidden states [batch, tokens, hidden] for the logits."""
        both = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        x = self.fc(both)
        mask = torch.full(x.shape[1:2] * 2, -math.inf, device=x.device, dtype=x.dtype).triu(1)[None, None]
        x = self.layers[0](x, position_embeddings=rotary, attention_mask=mask)
        normed: torch.Tensor = self.norm(x[0] if isinstance(x, tuple) else x)
        return normed


class Library:
    """The classes of one family in transformers."""

    def __init__(self, kind: str) -> None:
        name = "Qwen3_5Moe" if kind == "moe" else "Qwen3_5"
        module = getattr(transformers.models, "qwen3_5_moe" if kind == "moe" else "qwen3_5")
        self.modeling = getattr(module, f"modeling_{module.__name__.rpartition('.')[2]}")
        self.architecture = f"{name}ForConditionalGeneration"
        self.config, self.model = getattr(transformers, f"{name}Config"), getattr(transformers, self.architecture)
        self.norm, self.layer = getattr(self.modeling, f"{name}RMSNorm"), getattr(self.modeling, f"{name}DecoderLayer")


class Trainee(nn.Module):
    """Model and head together."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.library = Library(kind)
        text = TEXT | MLP[kind]
        config = self.library.config(text_config=text, vision_config=VISION, tie_word_embeddings=False, **TOKENS)
        for part in (config, config.text_config):
            part._experts_implementation = "eager"
        self.model = self.library.model(config)
        self.head = Head(self.library, self.model.config.text_config)
        for parameter in self.head.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
        self.gates: list[torch.Tensor] = []
        for module in self.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(lambda _module, _inputs, outputs: self.gates.append(outputs[0]))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the next token, and of the one after it, for tokens [batch, T + 2]: both [batch, T, vocabulary]."""
        decoder, length = self.model.model.language_model, tokens.shape[1] - 2
        self.gates.clear()
        hidden = decoder(input_ids=tokens[:, :length], use_cache=False).last_hidden_state
        positions = torch.arange(length, device=tokens.device)[None].expand(tokens.shape[0], -1)
        rotary = decoder.rotary_emb(hidden, positions[None].expand(3, -1, -1))
        drafted = self.head(decoder.embed_tokens(tokens[:, 1 : length + 1]), hidden, rotary)
        return self.model.lm_head(hidden), self.model.lm_head(drafted)

    def loss(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The training loss, and the cross entropies of next token and draft."""
        length = tokens.shape[1] - 2
        logits, drafts = (x.float().flatten(0, 1) for x in self(tokens))
        next_token = functional.cross_entropy(logits, tokens[:, 1 : length + 1].flatten())
        draft = functional.cross_entropy(drafts, tokens[:, 2 : length + 2].flatten())
        balance = 0.0
        if self.gates:
            text = self.model.config.text_config
            function = self.library.modeling.load_balancing_loss_func
            balance = BALANCE * function(tuple(self.gates), text.num_experts, text.num_experts_per_tok)
        return next_token + 0.5 * draft + balance, next_token, draft

    def trained(self) -> list[nn.Parameter]:
        """Everything but the vision tower."""
        return [p for n, p in self.named_parameters() if ".visual." not in n]


def read_texts() -> list[str]:
    """Python source files, shuffled."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for name in LIBRARIES:
        try:
            roots.append(Path(str(__import__(name).__file__)).parent)
        except ImportError:
            continue
    files = sorted({f for root in roots for f in root.rglob("*.py") if "test" not in f.parts})
    random.shuffle(files)
    texts, total = [], 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")[:60_000]
        if len(text) >= 500:
            texts.append(text)
            total += len(text)
        if total > MAX_CHARACTERS:
            break
    return texts


def train_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE tokenizer with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts[:600], trainer)
    end = special[0]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def sample(tokens: torch.Tensor, rows: int, length: int, device: str, generator: torch.Generator | None = None) -> torch.Tensor:
    """Random windows [rows, length + 2] of a token stream."""
    starts = torch.randint(0, tokens.numel() - length - 3, (rows,), generator=generator)
    return torch.stack([tokens[s : s + length + 2] for s in starts]).to(device)


def train(trainee: Trainee, tokens: torch.Tensor, seconds: float, device: str) -> None:
    """Trains for a time, with a cosine schedule over that time."""
    parameters = trainee.trained()
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    rows, length = (48, 256) if device == "cuda" else (4, 64)
    started, step = time.monotonic(), 0
    while (done := (time.monotonic() - started) / seconds) < 1:
        rate = 2e-3 * min(1, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device, dtype=torch.bfloat16):
            loss, next_token, draft = trainee.loss(sample(tokens, rows, length, device))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0:
            print(f"step {step}, {done:.0%}: {next_token.item():.3f} {draft.item():.3f}", flush=True)  # noqa: T201
        step += 1


@torch.no_grad()
def evaluate(trainee: Trainee, tokens: torch.Tensor, device: str) -> dict[str, float]:
    """Validation NLL a token, and how often the head's draft is the model's own next greedy token."""
    generator = torch.Generator().manual_seed(1)
    nll, agree, batches = 0.0, 0.0, 8
    for _ in range(batches):
        batch = sample(tokens, 16, 256, device, generator)
        logits, drafts = trainee(batch)
        nll += functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:257].flatten()).item() / batches
        agree += (drafts.argmax(-1)[:, :-1] == logits.argmax(-1)[:, 1:]).float().mean().item() / batches
    return {"nll": round(nll, 4), "head_agreement": round(agree, 4)}


def save(trainee: Trainee, tokenizer: Any, out: Path) -> None:
    """Writes the checkpoint: two shards, the head in the second."""
    out.mkdir(parents=True)
    body = {n: t.detach().cpu().contiguous() for n, t in sorted(trainee.model.state_dict().items())}
    head = {f"mtp.{n}": t.detach().cpu().contiguous() for n, t in trainee.head.state_dict().items()}
    names = list(body)
    half = len(names) // 2
    parts = [{n: body[n] for n in names[:half]}, {n: body[n] for n in names[half:]} | head]
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file(part, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for p in parts for t in p.values())}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = trainee.model.config
    config.architectures, config.dtype = [trainee.library.architecture], "bfloat16"
    config.save_pretrained(out)
    generation = {"eos_token_id": 0, "pad_token_id": 0, "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2))
    tokenizer.save_pretrained(out)


def main() -> None:
    """Reads the command line, trains, evaluates, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=MLP, default="dense")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--heldout", type=Path, help="also write held-out rows here, as jsonl")
    arguments = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = read_texts()
    tokenizer = train_tokenizer(texts)
    encoded = tokenizer.backend_tokenizer.encode_batch(texts)
    tokens = torch.tensor([i for row in encoded for i in (*row.ids, tokenizer.eos_token_id)])
    validation, training = tokens[:VALIDATION_TOKENS], tokens[VALIDATION_TOKENS:]
    trainee = Trainee(arguments.kind).to(device)
    train(trainee, training, arguments.seconds, device)
    trainee.to(torch.bfloat16)
    print(evaluate(trainee, validation, device))  # noqa: T201
    save(trainee, tokenizer, arguments.out)
    if arguments.heldout:
        rows = [tokenizer.decode(validation[i * 1500 : (i + 1) * 1500]) for i in range(64)]
        arguments.heldout.write_text("".join(json.dumps({"article": row}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
