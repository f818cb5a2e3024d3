"""Chat templates like those of models, written anew: {name: (template, the token that ends a turn)}."""

CHATML_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    '{%- endfor %}'
) + CHATML_PROMPT
WITH_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- 'Tools:' }}{%- for tool in tools %}"
    "{{- '\\n' + tool | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
)
CALLS = (
    '{%- for call in message.tool_calls %}'
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' '
    "}}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
)
TEMPLATES = {
    'chatml': (CHATML, '<|im_end|>'),
    'default system': (
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}"
        + CHATML,
        '<|im_end|>',
    ),
    'thinking prompt': (CHATML.replace("assistant\\n'", "assistant\\n<think>\\n'"), '<|im_end|>'),
    'empty thought': (
        CHATML.replace(
            "assistant\\n' }}",
            "assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking %}"
            "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
        ),
        '<|im_end|>',
    ),
    'generation tags': (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.role == 'assistant' %}"
        "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{%- else %}"
        "{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}" + CHATML_PROMPT,
        '<|im_end|>',
    ),
    'trimmed': (CHATML.replace('message.content', 'message.content | trim'), '<|im_end|>'),
    'llama 3': (
        "{%- if date_string is not defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
        "{{- bos_token }}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- set messages = messages[1:] %}"
        "{%- endif %}{{- '<|eot_id|>' }}{%- for message in messages %}{%- if message.tool_calls %}"
        "{%- if message.tool_calls | length != 1 %}{{- raise_exception('only one call at once') }}{%- endif %}"
        "{%- set call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        '{{- \'{"name": "\' + call.name + \'", "parameters": \' }}{{- call.arguments | tojson }}{{- \'}<|eot_id|>\' }}'
        "{%- elif message.role in ['tool', 'ipython'] %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
        "{{- message.content | tojson + '<|eot_id|>' }}{%- else %}{{- '<|start_header_id|>' + message.role }}"
        "{{- '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
        '<|eot_id|>',
    ),
    'today': (
        "{{- '<|im_start|>system\\nIt is ' + strftime_now('%Y-%m-%d') + '.<|im_end|>\\n' }}" + CHATML,
        '<|im_end|>',
    ),
    'llama 2': (
        "{%- set system = '' %}{%- if messages[0].role == 'system' %}"
        "{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}{%- set messages = messages[1:] %}"
        "{%- endif %}{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
        "{%- if message.role == 'user' %}{{- bos_token + '[INST] ' + (system if loop.first else '') }}"
        "{{- message.content.strip() + ' [/INST]' }}{%- else %}{{- ' ' + message.content.strip() + ' ' + eos_token }}"
        '{%- endif %}{%- endfor %}',
        '</s>',
    ),
    'mistral': (
        "{{- bos_token }}{%- for message in messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('After the optional system message, roles must alternate') }}{%- endif %}"
        "{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}"
        "{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}{%- else %}"
        "{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}{%- endfor %}",
        '</s>',
    ),
    'system last': (
        "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}"
        '{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}{%- for message in rest %}'
        "{%- if message.role == 'user' %}{%- if loop.last and system is defined %}"
        "{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}{%- else %}"
        "{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}{%- elif message.role == 'assistant' %}"
        "{{- ' ' + message.content + eos_token }}{%- else %}{{- raise_exception('unknown role') }}{%- endif %}"
        '{%- endfor %}',
        '</s>',
    ),
    'gemma': (
        "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}"
        "{%- endif %}{%- for message in messages %}{%- set role = 'model' if message['role'] == 'assistant' else "
        "message['role'] %}{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}",
        '<end_of_turn>',
    ),
    'drops thoughts': (
        WITH_TOOLS
        + '{%- set last = namespace(question=-1) %}{%- for message in messages %}{%- if message.role == "user" %}'
        '{%- set last.question = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}'
        "{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}"
        "{%- endif %}{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
        "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
        "{%- elif message.role == 'assistant' %}"
        "{%- set thought = '' %}{%- if message.reasoning_content is string %}"
        '{%- set thought = message.reasoning_content %}'
        "{%- elif '</think>' in content %}"
        "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > last.question and (loop.last or thought) %}"
        "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{%- else %}"
        '{{- content }}{%- endif %}' + CALLS + "{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
        "{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}{%- endif %}"
        '{%- endfor %}' + CHATML_PROMPT,
        '<|im_end|>',
    ),
    'tools': (
        WITH_TOOLS
        + "{%- for message in messages %}{%- if message.role == 'tool' %}{{- '<|im_start|>tool\\n' + message.content }}"
        "{{- '<|im_end|>\\n' }}{%- elif message.role != 'system' or not loop.first %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content }}{%- if message.tool_calls %}"
        + CALLS
        + "{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        + CHATML_PROMPT,
        '<|im_end|>',
    ),
    'asks for null': (
        "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}"
        "{{- '<|user|>' + message.content }}"
        "{%- elif message.role == 'system' %}{{- message.content }}{%- elif message.role == 'tool' %}"
        "{{- '<tool_output>' + message.content + '</tool_output>' }}{%- elif message.role == 'assistant' %}"
        "{{- '<|assistant|>' }}{%- if message.content is none %}{%- for call in message.tool_calls %}"
        "{{- '<tool_call>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```</tool_call>' }}"
        "{%- endfor %}{{- eos_token }}{%- else %}{%- set content = message.content %}{%- if '</think>' in content %}"
        "{%- set content = content.split('</think>')[-1] %}{%- endif %}{{- content + eos_token }}{%- endif %}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}",
        '</s>',
    ),
    'null is no text': (
        "{%- for message in messages %}{{- '<|' + message.role + '|>\\n' }}{%- if message.content is not none %}"
        '{{- message.content }}{%- endif %}{%- for call in message.tool_calls or [] %}'
        "{{- ' CALL ' + call['function']['name'] + ' ' + call['function']['arguments'] | tojson }}{%- endfor %}"
        "{{- eos_token + '\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}",
        '</s>',
    ),
    'developer': (
        "{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}"
        "{{- '<|start|>developer<|message|>' + messages[0].content + '<|end|>' }}{%- set messages = messages[1:] %}"
        "{%- endif %}{%- for message in messages %}{%- if message.role == 'assistant' %}{%- if message.thinking %}"
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
        "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- else %}"
        "{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}",
        '<|end|>',
    ),
    'parts': (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}{%- if message.content is string %}"
        "{{- message.content }}{%- else %}{%- for part in message.content %}{%- if part.type == 'text' %}"
        "{{- part.text }}{%- else %}{{- '<image>' }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}"
        '{%- endfor %}' + CHATML_PROMPT,
        '<|im_end|>',
    ),
    'takes in spaces': (
        "{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}"
        '{%- endfor %}'
        "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}",
        '<|end|>',
    ),
    'no end of turn': (
        "{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}",
        '</s>',
    ),
    'knows two roles': (
        "{%- for message in messages %}{%- if message.role == 'user' %}{{- '### Question:\\n' + message.content }}"
        "{{- '\\n\\n' }}{%- elif message.role == 'assistant' %}{{- '### Answer:\\n' + message.content + eos_token }}"
        "{{- '\\n\\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '### Answer:\\n' }}{%- endif %}",
        '</s>',
    ),
    'cuts off': (CHATML.replace('message.content', 'message.content[:40]'), '<|im_end|>'),
}
ASK_FOR_NULL = ('asks for null', 'null is no text')
DATES = {'%d %b %Y': '26 Jul 2024', '%Y-%m-%d': '2024-07-26'}
