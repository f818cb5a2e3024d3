# Does ADANA save compute, and more of it the larger the model? Five sizes, four optimizers, each with its own best
# learning rate, 20 tokens per parameter, three seeds at the best. 2.8 hours on 2 cores of an Intel Xeon; it goes on
# where it was stopped. docs/optimizers.md says what came of it.
#
#   python prepare_data.py --tokenizer=bytes --name=stdlib-bytes
#   python compare.py config/ladder_adana.py
#
# The published rules, with heads of 32 instead of 64, set width, steps, warm-up and weight decay (planning/rules.py).

strategies = ['single']  # a run is one process
at_once = 2
sweep = {'learning_rate': [2e-3, 4e-3, 8e-3]}  # and further, where the best is at an edge
recipes = {name: {'optimizer': name} for name in ('adamw', 'adana', 'dana-mk4', 'muon')}
sizes = {  # label: parameters
    '139k': {'heads': 2, 'n_layer': 2},
    '189k': {'heads': 2, 'n_layer': 3},
    '238k': {'heads': 2, 'n_layer': 4},
    '283k': {'heads': 3, 'n_layer': 2},
    '393k': {'heads': 3, 'n_layer': 3},
}
seeds = [1, 2, 3]  # the first for all rates
out_dir = 'out/ladder_adana'

arch = 'enoki'
head_dim = 32
block_size = 128
batch_size = 16  # x 128 = 2,048 tokens per step
z_loss = 1e-4
beta2 = 0.999  # of adamw in the paper; adana has none
grad_clip = 0.5
lr_schedule = 'cos_inf'
dataset = 'stdlib-bytes'
dtype = 'float32'
compile = True
log_interval = 100
eval_sequences = 3200
