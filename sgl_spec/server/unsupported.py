"""Fields that SGLang, vLLM or OpenAI define and this version does not have, on every route.

Each is accepted at null and at the values that ask for nothing, and refused by name otherwise, so
that a client who sends a whole object of defaults is served, and one who wants more is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # Prompts that are no text.
    **dict.fromkeys(("image_data", "video_data", "audio_data"), ([],)),
    "modalities": ([], ["text"]),
    **dict.fromkeys(("input_embeds", "prompt_embeds", "positional_embed_overrides"), ()),
    **dict.fromkeys(("mm_processor_kwargs", "mm_hashes", "mm_content_hashes"), ()),
    **dict.fromkeys(("images_config", "video_config"), ({},)),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch"), ()),
    "use_audio_in_video": (False,),
    # Other prompts than the client's, and other texts than the model's.
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "chat_template": (),
    "lora_path": ("",),
    "lora_id": (),
    "session_id": (),
    "session_params": ({},),
    # How the next token is chosen, and where a text ends.
    "best_of": (1,),
    "beam_width": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "typical_p": (1,),
    "no_repeat_ngram_size": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "watermark": (False,),
    "stop_regex": ("", []),
    "structural_tag": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "require_reasoning": (False,),
    "max_thinking_tokens": (),
    # What else a reply may tell.
    "moderation": (),
    "prompt_logprobs": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_indexer_topk": (False,),
    "return_entropy": (False,),
    "return_bytes": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_sampling_mask": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,),
    "return_cached_tokens_details": (False,),
    # Which server serves it, from which cache, and when.
    **dict.fromkeys(("extra_key", "cache_salt", "routing_key", "ngram_corpus_id"), ()),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), ()),
    "data_parallel_rank": (0,),
    "routed_dp_rank": (0,),
    "disagg_prefill_dp_rank": (0,),
    "kv_transfer_params": (),
    "prompt_cache_options": (),
    "priority": (0,),
    "background": (False,),
}
