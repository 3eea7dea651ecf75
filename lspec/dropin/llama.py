"""The class `Llama`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lspec.dropin import replies
from lspec.dropin.arguments import (
    RANDOM_SEED,
    cache_type,
    fill_in,
    is_random,
    placement,
    request_options,
    trained_window,
    with_one_text,
)
from lspec.dropin.refusals import CHAT, COMPLETION, LOADING, PRETRAINED, refuse
from lspec.dropin.replies import Head, LogprobLists, Reply
from lspec.engine import Engine
from lspec.errors import RequestError
from lspec.llama import Vocab
from lspec.llama import chat_format as named_format
from lspec.loading import load
from lspec.request import RequestOptions
from lspec.template import Message, Tool

_FILE_FORMAT = "chat_template.default"  # llama_cpp's name for the template in the file


class Llama:
    """A target and its draft behind the interface of `llama_cpp.Llama`.

    Methods take the same arguments and return the same dictionaries; docs/api.md lists what
    differs. `engine` is the `lspec.Engine` inside, `metadata` what the target's file says of
    itself. Callers in several threads wait for one another, also for the end of a stream.
    """

    def __init__(
        self,
        model_path: str | None = None,
        *,
        n_gpu_layers: int = -1,
        split_mode: int = 1,
        main_gpu: int = 0,
        tensor_split: list[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: dict[str, Any] | None = None,
        seed: int = RANDOM_SEED,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = -1,
        pooling_type: int = -1,
        attention_type: int = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool = False,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: Any = None,
        draft_model: Any = None,
        tokenizer: Any = None,
        type_k: int | None = None,
        type_v: int | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        draft_model_path: str | None = None,
        pair: str | None = None,
        gamma: int | str = "auto",
        drafter: str = "auto",
        exact: bool = False,
        force: bool = False,
    ) -> None:
        """Load `model_path`, with the draft `draft_model_path` if given, or a pulled `pair`.

        `n_ctx` 0 means the window that the model was trained on; `gamma`, `drafter`, `exact` and
        `force` are those of `lspec.load`. `last_n_tokens_size` is how far penalties look back.
        Raises RequestError for an argument that cannot be honoured, and what `lspec.load` raises.
        """
        refuse(Llama.__init__, locals(), LOADING)
        if model_path is None and pair is None:
            raise RequestError("there is nothing to load", hint="Give model_path or pair.")
        if model_path is not None and not Path(model_path).exists():
            hint = "Give the path of a .gguf file."
            raise RequestError(f"there is no file {model_path}", hint=hint)
        self.chat_format = chat_format or _FILE_FORMAT
        of_file = self.chat_format == _FILE_FORMAT
        self._format = None if of_file else named_format(self.chat_format)
        self.engine: Engine = load(
            pair,
            target=model_path,
            draft=draft_model_path,
            n_ctx=n_ctx or trained_window(model_path, pair),
            n_gpu_layers=n_gpu_layers,
            n_threads=n_threads,
            gamma=gamma,
            drafter=drafter,
            exact=exact,
            force=force,
            flash_attn="on" if flash_attn else "auto",
            **placement(split_mode, main_gpu, tensor_split),
            **cache_type(type_k, type_v),
        )
        self.model_path = str(model_path or pair)
        self.metadata = self.engine.metadata
        self.spm_infill = spm_infill
        self.last_n_tokens_size = last_n_tokens_size
        self.verbose = verbose
        self.set_seed(seed)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str,
        additional_files: list[str] | None = None,
        local_dir: str | PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: str | PathLike[str] | None = None,
        *,
        draft_repo_id: str | None = None,
        draft_filename: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a model of the hub, downloaded and checked unless it is on the disk.

        `filename` may have wildcards. A draft is fetched likewise; `kwargs` are the constructor's.
        Raises RequestError, DownloadError, and what the constructor raises.
        """
        from lspec.dropin.pretrained import fetch

        refuse(Llama.from_pretrained, locals(), PRETRAINED)
        if (draft_repo_id is None) != (draft_filename is None):
            raise RequestError("draft_repo_id and draft_filename belong together")
        if draft_repo_id is not None and draft_filename is not None:
            kwargs["draft_model_path"] = str(fetch(draft_repo_id, draft_filename))
        return cls(str(fetch(repo_id, filename, additional_files or ())), **kwargs)

    def create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: Any = None,
        logits_processor: Any = None,
        grammar: Any = None,
        logit_bias: Mapping[Any, float] | None = None,
    ) -> Any:
        """Continue `prompt`: a dictionary, or with `stream` an iterator over dictionaries.

        `suffix` is what follows the text to fill in, for a model that was trained for it. Raises
        RequestError, DecodeError.
        """
        refuse(Llama.create_completion, locals(), COMPLETION)
        if echo and logprobs is not None:
            raise RequestError(
                "echo with logprobs cannot be honoured: those of the prompt are never computed"
            )
        options = request_options(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            logprobs=logprobs,
            stop=stop,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repeat_penalty=repeat_penalty,
            top_k=top_k,
            seed=self._seed(seed),
            logit_bias=logit_bias,
            grammar=grammar,
            penalty_last_n=self.last_n_tokens_size,
        )
        return self._complete(
            self._prompt(prompt, suffix),
            options,
            model=model,
            stream=stream,
            start=len(prompt),
            before=self._text(prompt) if echo else "",
        )

    __call__ = create_completion

    def create_chat_completion(
        self,
        messages: list[Any],
        functions: Any = None,
        function_call: Any = None,
        tools: Any = None,
        tool_choice: Any = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: Any = None,
        grammar: Any = None,
        logit_bias: Mapping[Any, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
    ) -> Any:
        """Answer `messages`: a dictionary, or with `stream` an iterator over dictionaries.

        `tools` are shown to the model as its template does; a call in the answer stays text.

        Raises RequestError, DecodeError.
        """
        refuse(Llama.create_chat_completion, locals(), CHAT)
        if tools and isinstance(tool_choice, Mapping):
            raise RequestError("tool_choice cannot be honoured: no call can be forced here")
        prompt, more_stops = self._chat_prompt(messages, tools or ())
        options = request_options(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            logprobs=(top_logprobs or 0) if logprobs else None,
            stop=stop,
            more_stops=more_stops,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repeat_penalty=repeat_penalty,
            top_k=top_k,
            seed=self._seed(seed),
            logit_bias=logit_bias,
            response_format=response_format,
            grammar=grammar,
            penalty_last_n=self.last_n_tokens_size,
        )
        done = self._complete(prompt, options, model=model, stream=stream, start=len(prompt))
        return replies.chat(done) if isinstance(done, dict) else replies.chat_chunks(done)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """Answer as `create_chat_completion` does, in types of the openai package."""
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        done = self.create_chat_completion(*args, **kwargs)
        if isinstance(done, dict):
            return ChatCompletion(**done)
        return (ChatCompletionChunk(**chunk) for chunk in done)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the ids of a text in UTF-8; `special` reads the names of control tokens."""
        return self._vocab.tokenize(text, bos=add_bos, special=special)

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of `tokens` in UTF-8; `special` writes the names of control tokens.

        What came before, `prev_tokens`, makes no difference, as in llama_cpp. Raises RequestError.
        """
        vocab = self._vocab
        if not all(0 <= token < vocab.size for token in tokens):
            raise RequestError("there is a token id outside the vocabulary")
        text = b"".join(vocab.piece(token, special=special) for token in tokens)
        follows_bos = len(tokens) > 0 and tokens[0] == vocab.bos
        return text[1:] if follows_bos and text.startswith(b" ") else text

    def token_eos(self) -> int:
        """Return the end-of-sequence token."""
        return self._vocab.eos

    def token_bos(self) -> int:
        """Return the beginning-of-sequence token."""
        return self._vocab.bos

    def token_nl(self) -> int:
        """Return the token of a line feed."""
        return self._vocab.newline

    def n_ctx(self) -> int:
        """Return the window in tokens, as it was asked for."""
        return self.engine.n_ctx

    def n_vocab(self) -> int:
        """Return the number of token ids, unused ones included."""
        return self._vocab.size

    def set_seed(self, seed: int) -> None:
        """Decide the seeds of calls that name none: a sequence by `seed`; -1: random ones."""
        # It decides about texts, not about secrets.
        self._seeds = None if is_random(seed) else random.Random(seed)  # noqa: S311

    def reset(self) -> None:
        """Forget the text so far: the next prompt is evaluated from its start."""
        self.engine.forget()

    def close(self) -> None:
        """Free both models."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _vocab(self) -> Vocab:
        self.engine.require_open()
        return self.engine.vocab

    def _prompt(self, prompt: str | list[int], suffix: str | None) -> list[int]:
        """Return the ids of a prompt; with a suffix, those of a text to fill in."""
        if suffix is not None:
            return fill_in(self._vocab, prompt, suffix, suffix_first=self.spm_infill)
        return self.engine.tokenize(prompt) if isinstance(prompt, str) else list(prompt)

    def _chat_prompt(
        self, messages: list[Any], tools: Sequence[Tool]
    ) -> tuple[list[int], list[str]]:
        """Return the ids of the rendered chat and the stop strings of its format."""
        messages = [with_one_text(message) for message in messages]
        if self._format is None:
            return self.engine.tokenize_chat(messages, tools), []
        form, stops = self._format, []

        def render(messages: list[Message], tools: Sequence[Tool] = (), **variables: Any) -> str:
            prompt, more = form(messages)
            stops.extend(more)
            return prompt

        return self.engine.chats.tokenize(messages, render=render), stops

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return self.detokenize(prompt).decode("utf-8", errors="ignore")

    def _seed(self, seed: int | None) -> int | None:
        """Return `seed`, or the next of the sequence that the constructor was given one for."""
        return self._seeds.getrandbits(32) if seed is None and self._seeds else seed

    def _complete(
        self,
        prompt: list[int],
        options: RequestOptions,
        *,
        model: str | None,
        stream: bool,
        start: int,
        before: str = "",
    ) -> Reply | Iterator[Reply]:
        """Start a generation; `start` is the place of its text, `before` what it begins with."""
        piece: Callable[[int], bytes] = self._vocab.piece
        head = Head(self.model_path if model is None else model)
        lists = None if options.get("logprobs") is None else LogprobLists(piece, start=start)
        chunks = self.engine.stream(prompt, **options)
        if stream:
            return replies.streamed(head, chunks, lists, piece)
        return replies.whole(head, chunks, lists, before=before)
