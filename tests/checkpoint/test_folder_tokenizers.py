"""Tokenizers and chat templates from folders: ids, text, end tokens, refusals."""

from __future__ import annotations

import dataclasses
import json

import gguf_export
import pytest
import tokenizers
import transformers
from tokenizer_files import (
    MESSAGES,
    TEXTS,
    byte_level,
    read,
    save_folder,
    write,
)

from eaglejax.checkpoint.files import read_json
from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.safetensors_io import SafetensorsFile
from eaglejax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from eaglejax.checkpoint.torch_bin import TorchBinFile
from eaglejax.conversation import Conversation
from eaglejax.errors import CheckpointError, ConfigError, RequestError


class TestFolders:
    def test_ids_template_and_ends(self, tmp_path):
        folder, fast = save_folder(tmp_path, eos_token_id=7)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
        tokenizer = load_tokenizer(folder)
        for text in TEXTS:
            assert tokenizer.encode(text) == fast.encode(text)
        assert tokenizer.eos_ids == (3, 7, 9, fast.eos_token_id)
        assert tokenizer.bos_id == fast.bos_token_id
        want = fast.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
        assert tokenizer.apply_chat_template(MESSAGES) == want

    @pytest.mark.parametrize("as_object", [False, True])
    @pytest.mark.parametrize("decoder", [False, True])
    def test_named_tokens_in_special_tokens_map_alone(self, tmp_path, as_object, decoder):
        """As older folders have them; read where transformers reads them."""
        folder, _ = save_folder(tmp_path)
        settings = folder / "tokenizer_config.json"
        values = json.loads(settings.read_text())
        named = {key: values.pop(key) for key in ("bos_token", "eos_token")}
        if decoder:
            values["added_tokens_decoder"] = {}
        settings.write_text(json.dumps(values | {"tokenizer_class": "PreTrainedTokenizerFast"}))
        if as_object:
            named = {key: {"content": text, "lstrip": False} for key, text in named.items()}
        (folder / "special_tokens_map.json").write_text(json.dumps(named))
        template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
        (folder / "chat_template.jinja").write_text(template)
        fast = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer = load_tokenizer(folder)
        want = fast.apply_chat_template(MESSAGES, tokenize=False)
        assert tokenizer.render_chat(MESSAGES) == want
        assert want.startswith("<|endoftext|>") != decoder
        assert tokenizer.bos_id == fast.bos_token_id
        end = tokenizer.backend.token_to_id("<|im_end|>")
        assert tokenizer.eos_ids == (end,)
        assert fast.eos_token_id == (None if decoder else end)

    @pytest.mark.parametrize("eos", [None, "</unknown>", {"content": None}, 7])
    def test_an_end_that_nobody_knows(self, tmp_path, eos):
        folder, _ = save_folder(tmp_path, eos_token_id=None)
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": eos}))
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        tokenizer = load_tokenizer(folder)
        assert tokenizer.eos_ids == ()
        end = tokenizer.backend.token_to_id("<|im_end|>")
        assert tokenizer.with_eos(["<|im_end|>", 5]).eos_ids == (5, end)
        for wrong in ("</unknown>", -1, 10**6, True, 1.5):
            with pytest.raises(ConfigError, match="eos names"):
                tokenizer.with_eos([wrong])

    @pytest.mark.parametrize("eos", ["7", True, [1, "2"], 1.5, {"a": 1}])
    def test_an_end_that_is_no_id(self, tmp_path, eos):
        folder, _ = save_folder(tmp_path, eos_token_id=eos)
        with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id is"):
            load_tokenizer(folder)

    def test_ends_in_the_text_part_of_a_configuration(self, tmp_path):
        folder, fast = save_folder(tmp_path, text_config={"eos_token_id": [7, -1]})
        assert load_tokenizer(folder).eos_ids == (7, fast.eos_token_id)

    def test_a_template_in_a_file_of_its_own_wins(self, tmp_path):
        folder, _ = save_folder(tmp_path)
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
        assert load_tokenizer(folder).render_chat(MESSAGES) == "hello!"

    def test_the_default_of_several_templates(self, tmp_path):
        folder, _ = save_folder(tmp_path)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        path = folder / "tokenizer_config.json"
        several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": several}))
        assert load_tokenizer(folder).render_chat(MESSAGES) == "D"

    def test_truncation_and_padding_settings_are_dropped(self, tmp_path):
        folder, _ = save_folder(tmp_path)
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.enable_truncation(2)
        backend.enable_padding(length=8)
        backend.save(str(folder / "tokenizer.json"))
        assert len(load_tokenizer(folder).encode("a b c d", special=False)) == 7

    def test_saving_and_loading_keeps_everything(self, tmp_path):
        tokenizer = read(write(tmp_path / "t.gguf", byte_level))
        tokenizer.save(tmp_path)
        again = load_tokenizer(tmp_path)
        for name in ("eos_ids", "bos_id", "chat_template", "hash", "vocab_size", "specials"):
            assert getattr(again, name) == getattr(tokenizer, name), name
        assert [again.encode(t) for t in TEXTS] == [tokenizer.encode(t) for t in TEXTS]

    def test_a_folder_without_tokenizer(self, tmp_path):
        with pytest.raises(CheckpointError, match="holds no tokenizer"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("reader", [SafetensorsFile, TorchBinFile, GGUFFile, read_json, load_tokenizer])
    def test_a_pointer_of_git_lfs_is_called_one(self, tmp_path, reader):
        """Repositories cloned without git-lfs hold notes of this kind in place of all large files."""
        note = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
        path = tmp_path / "tokenizer.json"
        path.write_text(note)
        of_lists, of_folders = (SafetensorsFile, TorchBinFile), (load_tokenizer,)
        given = [path] if reader in of_lists else tmp_path if reader in of_folders else path
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is a Git LFS pointer"):
            reader(given)

    def test_a_damaged_tokenizer(self, tmp_path):
        folder, _ = save_folder(tmp_path)
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text[: len(text) // 2])
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
            load_tokenizer(folder)


TEMPLATES = [
    gguf_export.TEMPLATE,
    "{%- for m in messages %}\n    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
    "  {{ m.content | tojson }}\n{%- endfor %}",
    "{{ bos_token }}{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{{ eos_token }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    "{{ x | default('-') }}",
    "{% if tools is not none %}T{% endif %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{{ {'<é>': 1} | tojson }}",
]
TOOLS = {"x": 3, "tools": [{"type": "function", "function": {"name": "f"}}]}


class TestChatTemplates:
    @pytest.mark.parametrize("template", TEMPLATES)
    @pytest.mark.parametrize("variables", [{}, TOOLS])
    def test_rendered_as_by_transformers(self, tmp_path, template, variables):
        folder, fast = save_folder(tmp_path)
        (folder / "chat_template.jinja").write_text(template)
        fast.chat_template = template
        tokenizer = load_tokenizer(folder)
        messages = [{"role": "system", "content": "s"}, *MESSAGES]
        for prompt in (True, False):
            want = fast.apply_chat_template(
                messages, add_generation_prompt=prompt, tokenize=False, **variables
            )
            assert tokenizer.render_chat(messages, add_generation_prompt=prompt, **variables) == want

    def test_every_door_reads_contents_and_fields_alike(self):
        tokenizer = self.make(
            "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.tool_call_id }};"
            "{% endfor %}{% if think is defined and not think %}quick{% endif %}"
        )
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [
            {"role": "user", "content": parts},
            {"role": "tool", "content": None, "tool_call_id": "7"},
        ]
        want = '[{"n": 1}]user:ab:;tool::7;quick'
        assert tokenizer.render_chat(messages, tools=[{"n": 1}], think=False) == want
        talk = Conversation(tuple(messages), {"tools": [{"n": 1}], "think": False})
        assert tokenizer.render(talk) == want
        with pytest.raises(RequestError, match="'image'"):
            tokenizer.render_chat([{"role": "user", "content": [{"type": "image"}]}])
        with pytest.raises(RequestError, match=r"does not read 'thnik'; it reads think, tools"):
            tokenizer.render(dataclasses.replace(talk, variables={"thnik": False}))

    def make(self, template) -> Tokenizer:
        return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), (), chat_template=template)

    def test_no_template(self):
        with pytest.raises(RequestError, match="without a chat template"):
            self.make(None).apply_chat_template(MESSAGES)

    @pytest.mark.parametrize("messages", [[], ["hello"], [{"content": "x"}]])
    def test_messages_of_another_shape(self, messages):
        with pytest.raises(RequestError, match="messages must be a non-empty list of objects with a role"):
            self.make(gguf_export.TEMPLATE).apply_chat_template(messages)

    def test_what_the_template_refuses(self):
        tokenizer = self.make("{{ raise_exception('roles must alternate') }}")
        with pytest.raises(RequestError, match="rejects these messages: roles must alternate"):
            tokenizer.apply_chat_template(MESSAGES)

    def test_a_template_cannot_reach_out(self):
        tokenizer = self.make("{{ messages.__class__.__base__.__subclasses__() }}")
        with pytest.raises(RequestError, match="rejects"):
            tokenizer.apply_chat_template(MESSAGES)

    def test_a_broken_template(self):
        with pytest.raises(CheckpointError, match=r"not valid jinja \(line 1\)"):
            self.make("{% for %}").apply_chat_template(MESSAGES)
