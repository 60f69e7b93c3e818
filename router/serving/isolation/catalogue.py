"""What the fields of a request do to an engine, as far as they were read in the engines' own sources.

Reviewed: vLLM 0.32.0 (`vllm/entrypoints/**/protocol.py`, `sampling_params.py`), SGLang 0.5.23 (`sglang/srt/entrypoints/
openai/protocol.py`, `managers/io_struct.py`), TensorRT-LLM's `serve/openai_protocol.py`, llama.cpp's server; and what
OpenAI, Anthropic and Cohere describe. A name means one thing here, whatever the route: the worst it means anywhere.

    SAFE      about the caller's own prompt, sampling or answer
    STEERING  moves other work, names what is not the caller's, or makes the engine do or fetch something
    OURS      written by the gateway, whatever the client says

A field that is in none of them was not reviewed. `doctor` names those that an engine describes and this file does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from router.serving.apis import APIS

REVIEWED: Mapping[str, str] = {"vllm": "0.32.0", "sglang": "0.5.23"}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


OURS = frozenset(("model", "cache_salt", "stream", "stream_options"))

SAFE = _names(
    """
    messages prompt suffix echo input inputs texts images text_1 text_2 data_1 data_2 query queries documents items
    instructions instruction instruct system tokens token_ids file

    temperature top_p top_k min_p top_a typical_p frequency_penalty presence_penalty repetition_penalty length_penalty
    logit_bias seed stop stop_sequences stop_token_ids stop_regex no_stop_trim bad_words allowed_token_ids
    include_stop_str_in_output ignore_eos max_tokens max_completion_tokens max_output_tokens max_tokens_to_sample
    max_new_tokens min_tokens n best_of use_beam_search repetition_detection sampling_params truncate truncation
    truncation_side truncate_prompt_tokens padding max_tokens_per_doc max_tokens_per_query

    logprobs top_logprobs prompt_logprobs logprob_token_ids return_tokens_as_token_ids return_token_ids
    return_token_offsets return_prompt_text return_prompt_token_ids return_spec_tokens_details return_documents
    return_token_strs return_token_logprobs return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
    skip_special_tokens spaces_between_special_tokens stream_interval stream_include_usage
    stream_continuous_usage_stats mm_payload return_mm_kwargs output_mode detokenize flat_logprobs

    tools tool_choice parallel_tool_calls max_tool_calls functions function_call response_format structured_outputs
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern json_schema
    regex ebnf grammar text output_config

    add_generation_prompt continue_final_message add_special_tokens chat_template_kwargs task
    reasoning reasoning_effort include_reasoning separate_reasoning stream_reasoning thinking thinking_budget
    thinking_token_budget reasoning_ended enable_response_messages previous_input_messages

    user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention cache_control verbosity
    modalities audio prediction web_search_options include background previous_response_id conversation betas
    context_management container mcp_servers anthropic_version anthropic_beta inference_geo speed

    encoding_format dimensions output_dimension embedding_types input_type embed_dtype endianness normalize
    use_activation activation apply_softmax softmax label_token_ids item_first top_n

    language to_language hotwords timestamp_granularities timestamp_granularities[] voice speed instructions
    use_audio_in_video max_dynamic_patch min_dynamic_patch
    """
)

STEERING = _names(
    """
    priority rid request_id session_id session_params conversation_id conversation_params routing_key extra_key
    cache_salt_id data_parallel_rank routed_dp_rank disagg_prefill_dp_rank bootstrap_host bootstrap_port bootstrap_room
    kv_transfer_params ec_transfer_params disaggregated_params http_worker_ipc external_trace_header custom_labels
    log_metrics id_slot cache_prompt n_cache_reuse

    vllm_xargs extra_args custom_params custom_logit_processor logits_processors logits_processor
    reasoning_parser_kwargs chat_template mm_processor_kwargs media_io_kwargs images_config video_config
    lora lora_path lora_id lora_request watermark watermarking

    prompt_embeds input_embeds embed_overrides embed_override_token_id query_embed_overrides item_embed_overrides
    positional_embed_overrides features content_parts token_offsets input_ids prompt_token_ids image_data video_data
    audio_data data is_cross_encoder_request multi_item_delimiter_indices token_indices_to_pool decision_layout
    score_extraction_token modules

    return_hidden_states return_pooled_hidden_states return_routed_experts routed_experts_start_len
    routed_experts_prompt_start return_sampling_mask sampling_logprobs_mode return_cached_tokens_details
    return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext trace_decode_token_ids received_time
    """
)

SAMPLING_SAFE = _names(
    """
    structured_outputs prompt_logprob_token_ids prompt_logprob_start skip_reading_prefix_cache output_kind skip_clone
    """
)
"""Of `sampling_params`, beside what is safe at the top."""

TEMPLATE_STEERING = frozenset(("chat_template", "tokenize", "tokenizer"))
"""Of `chat_template_kwargs`: they replace arguments of the call itself (CVE-2025-61620)."""


def unreviewed(described: Mapping[str, Sequence[frozenset[str]]]) -> Iterator[tuple[str, str]]:
    """(path, field) of what an engine describes of our routes and this file does not know."""
    known = SAFE | STEERING | OURS
    for path in sorted(described.keys() & APIS.keys()):
        for field in sorted(frozenset().union(*described[path]) - known):
            yield path, field
