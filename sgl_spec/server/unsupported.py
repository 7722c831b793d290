"""Fields that SGLang, vLLM or OpenAI define and this version does not have, on every route.

Each is accepted at null and at the values that ask for nothing, and refused by name otherwise, so
that a client who sends a whole object of defaults is served, and one who wants more is told.
"""

from __future__ import annotations

from sgl_spec.server.fields import Refuse, Table

UNSUPPORTED: Table = {
    # Prompts that are no text.
    **dict.fromkeys(("image_data", "video_data", "audio_data"), Refuse(([],))),
    "modalities": Refuse(([], ["text"])),
    **dict.fromkeys(("input_embeds", "prompt_embeds", "positional_embed_overrides"), Refuse()),
    **dict.fromkeys(("mm_processor_kwargs", "mm_hashes", "mm_content_hashes"), Refuse()),
    **dict.fromkeys(("images_config", "video_config"), Refuse(({},))),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch"), Refuse()),
    "use_audio_in_video": Refuse((False,)),
    # Other prompts than the client's, and other texts than the model's.
    "truncate_prompt_tokens": Refuse(),
    "documents": Refuse(([],)),
    "chat_template": Refuse(),
    "lora_path": Refuse(("",)),
    "lora_id": Refuse(),
    "session_id": Refuse(),
    "session_params": Refuse(({},)),
    # How the next token is chosen, and where a text ends.
    "best_of": Refuse((1,)),
    "beam_width": Refuse((1,)),
    "use_beam_search": Refuse((False,)),
    "length_penalty": Refuse((1,)),
    "early_stopping": Refuse((False,)),
    "typical_p": Refuse((1,)),
    "no_repeat_ngram_size": Refuse((0,)),
    "bad_words": Refuse(([],)),
    "allowed_token_ids": Refuse(),
    "logits_processors": Refuse(([],)),
    "custom_logit_processor": Refuse(),
    "custom_params": Refuse(({},)),
    "watermark": Refuse((False,)),
    "stop_regex": Refuse(("", [])),
    "structural_tag": Refuse(),
    "guided_choice": Refuse(),
    "guided_decoding_backend": Refuse(),
    "guided_whitespace_pattern": Refuse(),
    "require_reasoning": Refuse((False,)),
    "max_thinking_tokens": Refuse(),
    # What else a reply may tell.
    "moderation": Refuse(),
    "prompt_logprobs": Refuse(),
    "return_hidden_states": Refuse((False,)),
    "return_routed_experts": Refuse((False,)),
    "routed_experts_start_len": Refuse((0,)),
    "return_indexer_topk": Refuse((False,)),
    "return_entropy": Refuse((False,)),
    "return_bytes": Refuse((False,)),
    "return_token_ids": Refuse((False,)),
    "return_tokens_as_token_ids": Refuse((False,)),
    "return_sampling_mask": Refuse((False,)),
    "return_flat_raw_top_logprobs": Refuse((False,)),
    "return_flat_raw_top_logprobs_b64": Refuse((False,)),
    "return_cached_tokens_details": Refuse((False,)),
    # Which server serves it, from which cache, and when.
    **dict.fromkeys(("extra_key", "cache_salt", "routing_key", "ngram_corpus_id"), Refuse()),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), Refuse()),
    "data_parallel_rank": Refuse((0,)),
    "routed_dp_rank": Refuse((0,)),
    "disagg_prefill_dp_rank": Refuse((0,)),
    "kv_transfer_params": Refuse(),
    "prompt_cache_options": Refuse(),
    "priority": Refuse((0,)),
    "background": Refuse((False,)),
}
