"""Chat templates of the forms that releases have, in words of our own, and conversations that they are asked to write."""

from small_tokenizers import byte_level
from tokenizers import AddedToken

from paradec_jax.tokenizer import Tokenizer

SPECIAL = """
<|im_start|> <|begin|> <|head|> <|/head|> <|eot|> <|user|> <|assistant|> <|system|> <|end|> <|endoftext|>
<start_of_turn> <end_of_turn> <bos> <User> <Assistant> <eos> <tool> </tool>
""".split()

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# A system message of its own, tools as JSON, calls as JSON, results in the user's turn.
QWEN2 = """
{%- set mine = messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + (messages[0].content if mine else 'Be of help.') }}
{%- if tools %}
{{- '\n# Tools' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in (messages[1:] if mine else messages) %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<result>' + m.content + '</result><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role }}
        {%- if m.content %}{{ '\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\n<call>{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}{{ '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Thoughts after the last question alone; one that is empty opens an answer that is not to think.
QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' + content }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in m.tool_calls %}
            {%- set call = call.function or call %}
            {{- '\n<call>' + call.name + ' ' }}
            {%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

# A date, trimmed contents, the tools in the first question, one call a message.
LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|head|>system<|/head|>\n\nToday: ' + date_string + '\n\n' + system + '<|eot|>' }}
{%- if tools is not none %}
    {{- '<|head|>user<|/head|>\n\n' }}{% for t in tools %}{{ t | tojson(indent=1) }}{% endfor %}
    {{- messages[0].content | trim + '<|eot|>' }}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role == 'tool' or 'tool_calls' in m) %}
        {{- '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot|>' }}
    {%- else %}
        {{- '<|head|>ipython<|/head|>\n\n' }}{{ m.content | tojson }}{{ '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""

PHI = """{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"""

# The prompt opens a thought, the history has none; a call has no content, and its arguments are a text.
R1 = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'system' %}{{ m['content'] }}{% endif %}
{%- if m['role'] == 'user' %}{{ '<User>' + m['content'] }}{% endif %}
{%- if m['role'] == 'tool' %}{{ '<tool>' + m['content'] + '</tool>' }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
    {{- '<Assistant>' }}{% for call in m['tool_calls'] %}
    {{- call['function']['name'] + '\n' + call['function']['arguments'] + '\n' }}{% endfor %}{{ '<eos>' }}
{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}
    {%- set content = m['content'] %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}
    {{- '<Assistant>' + content + '<eos>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}"""

SMOL = """{% for m in messages %}{% if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\nBe small.<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Not among TEMPLATES: the end of a turn is outside of the marks, or the next message's begin.
unended = MARKED.replace(
    "m.content + '<|im_end|>' }}{% endgeneration %}", "m.content }}{% endgeneration %}<|im_end|>"
)

next_ends = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

TEMPLATES = {
    name.lower(): text for name, text in dict(globals()).items() if name.isupper() and isinstance(text, str)
}
SYSTEM = {"role": "system", "content": "Count."}
TALK = [
    {"role": "user", "content": " Two and two? "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
    {"role": "user", "content": "and one?"},
    {"role": "assistant", "content": "<b>5</b>"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": None, "<ö>": 1}}}]


def called(arguments: object) -> list:
    """A conversation with a call."""
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [TALK[0], calls, {"role": "tool", "content": "4", "tool_calls": None}, TALK[3]]


def tokenizer(*plain: str) -> Tokenizer:
    """Every byte a letter, and the tokens of all templates; those of `plain` are added and not special."""
    backend = byte_level()._backend
    backend.add_tokens([AddedToken(text, normalized=False) for text in plain])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL if text not in plain])
    return Tokenizer(backend)
