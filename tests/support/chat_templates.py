"""Chat templates in the manner of well-known model families, written for these tests."""

# Turns between two tokens, as in Qwen and many others; a default system prompt.
CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe of use.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Tools as in Hermes and Qwen: declarations in the system prompt, calls and their results in turns.
HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Llama 2: the system prompt inside the first turn, strictly alternating roles, bos before each.
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}\
{% set first = messages[0]['content'] %}{% else %}{% set turns = messages %}\
{% set first = false %}{% endif %}
{% for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if loop.index0 == 0 and first is not false %}
{% set content = '<<SYS>>\\n' + first + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}
"""

# Llama 3: headers, a date, tool arguments as JSON.
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- set ns = namespace(seen=false) %}
{%- for message in messages %}
    {%- if not ns.seen %}
        {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\nToday: ' ~ date_string }}
        {%- set ns.seen = true %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n' }}
    {%- endif %}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", ' }}
            {{- '"parameters": ' + call.function.arguments | tojson(indent=2) + '}' }}
        {%- endfor %}
    {%- else %}
        {{- '\\n' + message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Mistral: filters, a slice, a loop that ends early.
MISTRAL = """\
{%- set words = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') \
| join('\\n') %}
{%- set turns = messages | rejectattr('role', 'equalto', 'system') | list %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'tool' %}{%- continue %}{%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' }}
        {%- if loop.last and words %}{{- words + '\\n\\n' }}{%- endif %}
        {{- message['content'] + '[/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
    {%- if loop.index > 50 %}{%- break %}{%- endif %}
{%- endfor %}
"""

# Zephyr: each block is on its own line, so that only a correct trimming of spaces passes.
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{% generation %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endgeneration %}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

# Gemma: another name of the assistant role, macros, a filter.
GEMMA = """\
{%- macro turn(role, content) -%}
{{ '<start_of_turn>' ~ ('model' if role == 'assistant' else role) ~ '\\n' ~ content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endmacro -%}
{{ bos_token }}{% if messages[0].role == 'system' %}{{ turn('user', messages[0].content) }}\
{% endif %}
{%- for message in messages if message.role != 'system' %}{{ turn(message.role, message.content) }}\
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "gemma": GEMMA,
}
# The turn markers of some templates: special tokens, then added tokens that are not special.
SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
ADDED = ("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "[INST]", "[/INST]")
