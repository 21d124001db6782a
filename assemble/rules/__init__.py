"""The law book: what vLLM requires of a checkpoint of this recipe, one small function a rule, all listed in `RULES`."""

from assemble.rules import config, files, head, identity, modules
from assemble.rules.model import Detail, Finding, Needs, Rule, Severity, Subject

E, W = Severity.ERROR, Severity.WARNING
MODELOPT = "vLLM 0.33 layers/quantization/modelopt.py"
WEIGHT_UTILS = "vLLM 0.33 model_loader/weight_utils.py"

RULES: tuple[Rule, ...] = (
    Rule("IDX-1", E, "files that the index does not name are not read, in silence; absent ones stop the load",
         WEIGHT_UTILS, files.index_and_files),
    Rule("IDX-2", E, "a tensor stored twice is loaded twice, the last file wins, in silence",
         WEIGHT_UTILS, files.index_and_headers),
    Rule("IDX-3", W, "vLLM ignores it; other readers check it",
         "huggingface_hub 1.33 serialization", files.total_size_and_names),
    Rule("IDX-4", E, "a cut file fails to load", "safetensors 0.8", files.sound_headers),
    Rule("IDX-5", E, "vLLM would take the checkpoint for another kind",
         "vLLM 0.33 model_loader/default_loader.py:165", files.forbidden_files),
    Rule("IDX-6", W, "transformers refuses a shard without it",
         "transformers 5.14 modeling_utils.py load_state_dict", files.pt_metadata),
    Rule("CFG-2", E, "the dtype is then guessed from the tensors, and the mixed method refuses the guess",
         "vLLM 0.33 config/vllm.py:930", config.dtype_bfloat16),
    Rule("CFG-3", E, "vLLM ties: the packed lm_head is replaced by the embedding, in silence or with a load error",
         "vLLM 0.33 config/model.py:1255", config.untied),
    Rule("CFG-4", E, "the draft model has no layers: ZeroDivisionError",
         "vLLM 0.33 transformers_utils/model_arch_config_convertor.py:733", config.mtp_declared),
    Rule("CFG-6", E, "served unquantized, then a shape error; or 'Unknown ModelOpt quant algo' before 0.33",
         f"{MODELOPT}:1658", config.quantization_declared),
    Rule("CFG-7", E, "servers that read the other file serve something else", "SGLang #27906", config.twins_agree),
    Rule("CFG-8", E, "the KV cache is served in BF16, twice the size, in silence",
         "vLLM 0.33 utils/torch_utils.py:443", config.kv_cache_scheme),
    Rule("CFG-9", E, "a layer with an unknown algorithm is built unquantized, in silence",
         f"{MODELOPT}:1895", config.known_schemes),
    Rule("CFG-13", E, "vLLM builds the tokenizer when it builds the model",
         "vLLM 0.33 models/qwen3_5.py:508", files.side_files_present),
    Rule("Q-1", E, "the entry has no effect; the module that was meant is BF16 or garbage",
         f"{MODELOPT}:1748", modules.listed_modules_exist),
    Rule("Q-2", E, "a missing weight_scale_2 leaves uninitialised memory, in silence",
         f"{MODELOPT}:2018", modules.nvfp4_tensors),
    Rule("Q-3", E, "a missing input_scale or weight_scale is garbage, in silence", f"{MODELOPT}:2177", modules.fp8_tensors),
    Rule("Q-4", E, "packed bytes are cast to BF16, in silence, or the load fails",
         f"{MODELOPT}:1844", modules.quantized_weights_are_listed),
    Rule("Q-5", E, "vLLM infers the unlisted member's format, or raises 'Mixed quant_algo within fused layer'",
         f"{MODELOPT}:1748", modules.fused_groups_agree),
    Rule("Q-6", E, "one scale is used for both: the other member is wrong by their ratio; a warning only",
         f"{MODELOPT}:2058", modules.gate_up_share_scale),
    Rule("Q-8", E, "NaN or garbage output", f"{MODELOPT}:2068", modules.scales_are_sound, Needs.VALUES),
    Rule("Q-11", E, "vLLM builds these modules without a quantization config",
         "vLLM 0.33 models/qwen_gdn_linear_attn.py:597", modules.only_the_recipes_modules),
    Rule("Q-12", E, "'There is no module or parameter named …'", "vLLM 0.33 models/utils.py:222", modules.known_names),
    Rule("Q-13", E, "the parameter keeps whatever was in memory, in silence",
         "vLLM 0.33 default_loader.py track_weights_loading", modules.complete_body),
    Rule("Q-13b", E, "a changed BF16 tensor: worse answers, no error", "law 3 of this project",
         identity.unquantized_identical, Needs.SOURCE),
    Rule("IGN-1", W, "vLLM does not need it; SGLang and plain FP4 readers do", "vllm#38832", modules.ignore_covers_mtp),
    Rule("IGN-2", E, "the packed module is built in BF16: garbage or a shape error",
         f"{MODELOPT}:191", modules.ignore_spares_the_quantized),
    Rule("IGN-3", E, "'Detected some but not all shards'",
         "vLLM 0.33 quantization/utils/quant_utils.py:619", modules.ignore_groups_whole),
    Rule("MTP-1", E, "missing: uninitialised, no draft accepted, no error; extra: the load fails",
         "vLLM 0.33 models/qwen3_5_mtp.py:302", head.head_names_and_shapes),
    Rule("MTP-2", E, "listed but BF16: rows cut off in silence, then NaN",
         "vLLM 0.33 models/qwen3_5_mtp.py:99", head.head_bf16),
    Rule("MTP-3", E, "a head of other content drafts what is never accepted, no error", "vllm#43455",
         identity.head_identical, Needs.SOURCE),
)  # fmt: skip

__all__ = ["RULES", "Detail", "Finding", "Needs", "Rule", "Severity", "Subject"]
