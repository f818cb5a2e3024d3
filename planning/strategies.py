"""
Which files divide the work of a layout. Each has check(keys, layout, shape), which raises ValueError for what it cannot
do; holds(plan), the bytes of {part} that it makes a rank hold; and sends(plan), the bytes of {kind} that it makes a
rank send in an optimizer step. A file is imported only for a layout that needs it.

    for lesson in strategies.of(layout):
        lesson.check(keys, layout, shape)
"""


def of(layout):
    """The lessons of a layout. The first one says where the weights are."""
    lessons = []
    if layout.strategy == 'ddp':
        from planning import ddp

        lessons.append(ddp)
    elif layout.strategy == 'pipeline':
        import pipeline_manual

        lessons.append(pipeline_manual)
    elif layout.strategy == 'deepspeed':
        import deepspeed_engine

        lessons.append(deepspeed_engine)
    else:
        from planning import fsdp

        lessons.append(fsdp)
    if layout.context > 1:
        import context_manual

        lessons.append(context_manual)
    if layout.tensor > 1:
        import tensor_manual

        lessons.append(tensor_manual)
    if layout.expert > 1:
        import expert_manual

        lessons.append(expert_manual)
    if layout.is_diloco:
        import diloco

        lessons.append(diloco)
    return lessons
