"""
The tokens by which a chat template says where a turn begins and ends, and which no message may write.

    controls = ControlTokens(content, is_control)            # content: of a tokenizer.json
    text = controls.written(render(controls.spelled_out(messages)))    # what a template has written
    ids = controls.encode(text)
    ids, n_asked = controls.answered(prompt, text)           # the text begins with the prompt

A tokenizer takes <|im_end|> for a control token wherever it stands, so that a user could end a turn and speak for the
assistant. Therefore the tokenizer here knows these tokens by another name: MARK and their text. In what written()
returns, MARK stands before each control token that the template has written, and before nothing else. What a message
spells is left without a name, so that it gets the tokens of its letters.

A model answers behind the ids of a prompt. So the ids of a prompt with its answer have to begin with those, also where
the two together would be cut into other tokens: if a prompt ends with a line feed and the answer begins with one, some
vocabularies have a token for both.
"""

import json
import re

# Unicode's noncharacters are meant for such uses: no text has them.
MARK = '\ufdd0'
BEFORE_WORDS = ('lstrip', 'single_word')  # flags of a token that depends on what stands before it


def plain(text):
    """What a template has written, for people to read."""
    return text.replace(MARK, '')


class ControlTokens:
    def __init__(self, content, is_control):
        """content: a tokenizer.json, parsed; it is changed. is_control: function from an entry of its added_tokens to
        whether that is a control token. Raises ValueError if the letters of one make that token, too."""
        from tokenizers import Tokenizer

        model, normalizer = content['model'], content.get('normalizer')
        found = [token for token in content['added_tokens'] if is_control(token)]
        new_name = {token['content']: MARK + token['content'] for token in found}
        for token in found:
            # If it is searched for behind the normalizer, that has to treat its name as it treats its text.
            token.update(content=new_name[token['content']], normalized=token['normalized'] and bool(normalizer))
        if isinstance(model['vocab'], list):  # of a unigram model, which would find them even as ordinary words
            model['vocab'] = [[new_name.get(word, word), score] for word, score in model['vocab']]
        else:
            model['vocab'] = {new_name.get(word, word): number for word, number in model['vocab'].items()}
        unknown = model.get('unk_token')  # stands for letters, and no template writes it
        if unknown in new_name:
            model['unk_token'] = new_name[unknown]
        if model['type'] == 'Unigram' and model.get('unk_id') is not None:
            unknown = model['vocab'][model['unk_id']][0].removeprefix(MARK)
        # The template writes all special tokens itself.
        content |= {'truncation': None, 'padding': None, 'post_processor': None}
        try:
            self.tokenizer = Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library has no class for its errors
            raise ValueError(f'a control token is also what merges make of its letters ({error})') from error
        parts = {name: _without_prefix(content.get(name)) for name in ('normalizer', 'pre_tokenizer')}
        adds_prefix = any(part != content.get(name) for name, part in parts.items())
        self.going_on = Tokenizer.from_str(json.dumps(content | parts)) if adds_prefix else self.tokenizer

        self.texts = sorted(new_name.keys() - {unknown}, key=len, reverse=True)
        self.ids = {self.tokenizer.token_to_id(MARK + text) for text in self.texts}
        any_of = '|'.join(map(re.escape, self.texts)) or '(?!)'
        self.any, self.any_or_mark = re.compile(any_of), re.compile(f'{any_of}|{MARK}')
        # What stands before a control token makes no difference to the tokens from there on, with these exceptions.
        self.is_cut = not any(token['normalized'] or any(token[flag] for flag in BEFORE_WORDS) for token in found)

    def spelled_out(self, value, kept=None):
        """The value with MARK between the letters of each control token that its texts spell, so that written() does
        not take it for the template's. kept: a pattern of those that stay."""
        if isinstance(value, str):
            stays = kept.fullmatch if kept else lambda text: False
            return self.any.sub(lambda found: found[0] if stays(found[0]) else MARK.join(found[0]), value)
        if isinstance(value, dict):
            return {self.spelled_out(key): self.spelled_out(part, kept) for key, part in value.items()}
        return [self.spelled_out(part, kept) for part in value] if isinstance(value, list) else value

    def written(self, text):
        """What a template has made of messages that were spelled_out(): with MARK before its own control tokens."""
        return self.any_or_mark.sub(lambda found: '' if found[0] == MARK else MARK + found[0], text)

    def encode(self, text, known=None):
        """The ids of a text of written(), as a list. known: a dict that remembers those of its parts. Raises ValueError
        if there are other control tokens among them than those of the template."""
        known = {} if known is None else known
        if not self.is_cut:
            parts = [text]
        else:
            before, *behind = text.split(MARK)
            parts = [before, *(MARK + part for part in behind)]
        ids = []
        for part in parts:
            if part not in known:
                known[part] = self._encode(part)
            ids += known[part]
        return ids

    def answered(self, prompt, text, known=None):
        """(ids of a text, how many of them are the prompt's, with which it begins). These are encode(prompt)."""
        asked, ids = self.encode(prompt, known), self.encode(text, known)
        if ids[: len(asked)] != asked:  # a token of the whole text crosses the border
            words, mark, rest = text[len(prompt) :].partition(MARK)
            words = self.going_on.encode(words, add_special_tokens=False).ids
            ids = [*asked, *words, *self.encode(mark + rest, known)]
        return ids, len(asked)

    def _encode(self, text):
        ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        wanted = text.count(MARK)
        if self._count(ids) < wanted:
            # To the tokenizer one of them is none, because it has the flag single_word and touches a word, or because
            # it is searched for behind the normalizer with a space before it (Llama 1). Then its letters remain.
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
            spans = [span for number, span in zip(encoding.ids, encoding.offsets, strict=True) if number in self.ids]
            marks = [found.start() for found in re.finditer(MARK, text)]
            letters = {mark for mark in marks if not any(start <= mark < end for start, end in spans)}
            text = ''.join(letter for place, letter in enumerate(text) if place not in letters)
            ids, wanted = self.tokenizer.encode(text, add_special_tokens=False).ids, text.count(MARK)
        if self._count(ids) != wanted:
            raise ValueError('rows with a text of which the tokenizer makes a control token')
        return ids

    def _count(self, ids):
        return sum(map(self.ids.__contains__, ids))


class ControlTokensOfPython:
    """The same for asking with a tokenizer that is Python code, which cannot be told that a text is letters. Raises
    ValueError for a message that spells a control token."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids = tokenizer, {*tokenizer.all_special_ids}
        self.any = re.compile('|'.join(map(re.escape, tokenizer.all_special_tokens)) or '(?!)')

    def spelled_out(self, value, kept=None):
        if found := self.any.search(json.dumps(value, ensure_ascii=False)):
            raise ValueError(f'a message spells the control token {found[0]}, which this tokenizer takes for one')
        return value

    def written(self, text):
        return text

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)


def _without_prefix(part):
    """A normalizer or pre_tokenizer of a tokenizer.json without the space that it puts before a text."""
    if isinstance(part, list):
        return [_without_prefix(one) for one in part if not (isinstance(one, dict) and one.get('type') == 'Prepend')]
    if not isinstance(part, dict):
        return part
    if part.get('type') == 'Prepend':
        return None
    never = {'prepend_scheme': 'never', 'add_prefix_space': False}
    return {key: never[key] if key in never else _without_prefix(value) for key, value in part.items()}
