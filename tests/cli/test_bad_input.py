"""Bad input through the real command: exit code 2, one line that says what is wrong, and no files."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from pipar.cli import main
from pipar.job.profiles import profile_key
from pipar.profiling.cache import keep_profile
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.config import Config

FACTORIES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def wrong_classes():
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 7))

def wrong_input():
    return nn.Sequential(nn.Flatten(), nn.Linear(99, 10))

def not_a_module():
    return "resnet18"

class Branching(nn.Linear):
    def forward(self, x):
        flat = x.flatten(1)
        return super().forward(flat if flat.sum() > 0 else -flat)

def branching():
    return Branching(1024, 10)

def batch_norm():
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 10), nn.BatchNorm1d(10))

def no_held_out(name):
    if name in ("validation", "test"):
        return None
    return TensorDataset(torch.zeros(20, 1, 32, 32), torch.arange(20) % 10)

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask):
        return self.head((self.embed(input_ids) * attention_mask.unsqueeze(-1)).mean(1))

def tokens(name):
    return [({"input_ids": torch.arange(5) + at, "token_types": torch.zeros(5)}, at % 3) for at in range(9)]

def masked_tokens(name):
    return [({"input_ids": torch.arange(5) + at, "attention_mask": torch.ones(5)}, at % 3) for at in range(99)]

class ByOneNorm(torch.optim.SGD):
    def step(self, closure=None):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        for weight in weights:
            weight.grad.div_(norm)
        super().step(closure)

def couples(named):
    return ByOneNorm([weight for _, weight in named], lr=0.1)

def lbfgs(named):
    return torch.optim.LBFGS([weight for _, weight in named])

class Noted(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["note"] = "text"

def noted(named):
    return Noted([weight for _, weight in named], lr=0.1)

def nothing(named):
    return None

def first_only(named):
    return torch.optim.SGD([weight for _, weight in named][:1], lr=0.1)

def rises(step, total):
    return -1.0

number = 5

def linear(outputs=1):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))

def five():
    return linear(5)

def numbers(name):
    return TensorDataset(torch.randn(40, 4), torch.randn(40))

def two_targets(name):
    return [(torch.randn(4), (1.0, 2.0)) for _ in range(40)]

def not_alike(name):
    return [(torch.randn(4), [1.0] * (1 + at % 2)) for at in range(40)]

def untold(name):
    return [(torch.randn(4), None) for _ in range(40)]

def far(name):
    return [(torch.randn(4), float("nan")) for _ in range(40)]

def labelled(name):
    return TensorDataset(torch.randn(40, 4), torch.arange(40) % 5)

def no_number(output, targets):
    return output

def failing(output, targets):
    raise ValueError("not today")
"""
#: A safetensors file with one empty tensor "x".
OTHER_WEIGHTS = b"\x38" + b"\0" * 7 + b'{"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}  '
OWN_DATA = "run --virtual --set model.factory=own_models:linear --set data.factory=own_models"
NUMBERS = f"{OWN_DATA}:numbers --set task.loss=mse"
OWN_ENCODER = "run --virtual --set model.factory=own_models:Encoder --set"
TORN = "[run\nepochs = 1"
MNIST_LIKE = "run --virtual --data synthetic --set data.shape=[1,28,28]"

#: The command line (words split at blanks), and words that its one line has.
COMMANDS = [
    # accelerators
    (
        "run --virtual --set server.torch_device=cuda",
        "server.torch_device = 'cuda', but torch finds no accelerator on this machine: write 'auto', 'cpu', or install",
    ),
    (
        "run --virtual --set devices.torch_device=xpu:1",
        "devices.torch_device = 'xpu:1', but torch finds no accelerator",
    ),
    ("run --set server.torch_device=GPU", "is not a device of torch: write auto, cpu, cuda, cuda:1 for the second one"),
    (
        "run --virtual --set model.dtype=float64 --set server.autocast=bf16",
        "server.autocast = 'bf16' rounds to 8 bits what model.dtype = 'float64' asks to compute exactly",
    ),
    ("run --set devices.autocast=fp16", "devices.autocast"),
    # unknown words
    ("runn", "'runn' is not a command; there are certs, compare, completion, cuts, data,"),
    ("data fetch", "'fetch' is not a command; there are get, list"),
    ("run --colour red", "No such option"),
    ("run --estimate paper", "It is a key of the configuration: write --set plan.estimate=VALUE."),
    ("run --batch-size 10", "write --set run.batch_size=VALUE."),
    ("plan --profile=x --replan", "write --set plan.replan=VALUE."),
    ("run --partition=iid", "write --set data.partition=VALUE."),
    ("compare --plan.window 3", "write --set plan.window=VALUE."),
    ("run --profile x.json", "write --set server.profile=VALUE or --set devices.profile=VALUE."),
    ("--estimate", "No such option '--estimate' of `pipar`: it belongs to `pipar plan`."),
    ("run --resume", "No such option '--resume' of `pipar run`: it belongs to `pipar server`."),
    ("compare --virtual --server 127.0.0.1:1", "of `pipar compare`: it belongs to `pipar device`."),
    ("run --virtual --timing-only", "exclude each other"),
    ("run --dashboard train.toml", "--dashboard train.toml is not an address: write HOST:PORT"),
    ("compare --dashboard 127.0.0.1:99999", "'127.0.0.1:99999' is not an address"),
    ("run --dashboard --dashboard-token short", "needs 16 or more letters"),
    ("run --dashboard-token correct-horse-battery", "is for the live page: add --dashboard."),
    ("server --dashboard 192.0.2.1:80", "Cannot serve the live page on 192.0.2.1:80:"),
    ("run a.toml b.toml", "unexpected extra argument"),
    ("run --epochs", "--epochs"),
    ("leakage --split-points one", "--split-points one is not a list of layers: write numbers, as in 1,2."),
    (
        "leakage --split-points 1,9",
        "split point 9 is outside 1..4: vgg5 has 5 layers, and after the last one",
    ),
    ("leakage --attacks large", "--attacks names 'large', which is not an attack: there are small, long, decoder."),
    ("leakage --model vgg6", "--model vgg6 is neither a network nor a file: the networks are vgg5,"),
    ("leakage --model torn.toml", "torn.toml is not a safetensors file: give the model.safetensors of a run."),
    ("leakage -o /dev/null/here", "Cannot write to the folder /dev/null/here: Not a directory; give another one."),
    ("plan --set privacy.max_leakage=0.5", "privacy.max_leakage = 0.5 needs privacy.leakage"),
    (
        "plan --set privacy.max_leakage=0.5 --set privacy.leakage=none.json",
        "Cannot read the leakage file none.json: No such file or directory. Measure it with 'pipar leakage'.",
    ),
    (
        "run --timing-only --set privacy.max_leakage=0.5 --set privacy.leakage=torn.toml",
        "torn.toml is not a file that 'pipar leakage' wrote: it is not valid JSON",
    ),
    # keys and values
    ("run --set run.epoch=3", "'epoch' is not a key of [run]: did you mean 'epochs'?"),
    ("run --set colours.red=1", "'colours' is not a key of the configuration"),
    ("run --set run.epochs", "is not a setting; write --set section.key=value"),
    ("run --set run.epochs=0", "run.epochs = 0 is not allowed: it should be at least 1"),
    ("plan --devices 1000000000", "devices.count = 1000000000 is not allowed: it should be at most 1000000"),
    ("plan --set run.batch_size=2000000", "run.batch_size = 2000000 is not allowed: it should be at most 1000000"),
    ("device --server localhost:1 --certs nowhere --name a", "copy ca.pem and the files that `pipar certs issue` made"),
    ("run --epochs many", "run.epochs = 'many' is not allowed: it should be a whole number"),
    ("run --method fedsgd", "run.method = 'fedsgd' is not known; allowed are pipar, fl"),
    ("run --model vgg6", "model.name = 'vgg6' is not known"),
    ("run --data digit", "data.name = 'digit' is not known"),
    ("run --link 5g", "devices.link = '5g' is not a link; there are 4g, 4g+, wifi, unlimited; or write {up = "),
    ("run --link 5g", 'or {cycle = ["4g", "wifi"], every = "60s"}'),
    ("run --link {up=-1}", "devices.link.up"),
    ("run --speed 0", "devices.speed = 0 is not allowed"),
    (
        "run --set devices.threads=0",
        "devices.threads = 0 is not allowed: give a whole number from 1 to 1024, or 'auto'",
    ),
    ("run --set devices.threads=all", "devices.threads = 'all' is not allowed"),
    ("run --set devices.threads=1000", "devices.threads = 1000 is more than the "),
    ("profile --threads 1000", "--threads = 1000 is more than the "),
    ("profile --threads many", "--threads many is not allowed: give a whole number from 1 on, or 'auto'"),
    (
        "plan --set devices.profile=raspberry-pi-5 --set devices.threads=2",
        "The profile raspberry-pi-5 is of 4 threads for each stage, but 2 threads would compute it",
    ),
    (
        "run --timing-only --set server.cores=2 --set server.threads=3",
        "is more than the server's 2 cores: give at most 2",
    ),
    ("run --devices 0", "devices.count = 0 is not allowed"),
    ("run --seed -1", "run.seed = -1 is not allowed"),
    ("run --name ../up", "run.name = '../up' is not allowed"),
    ("run --set server.listen=here:99999", "a port from 0 to 65535"),
    (
        "run --set server.listen=0.0.0.0:0",
        "Cannot listen on 0.0.0.0:0: `pipar run` has no TLS, so it listens on loopback only",
    ),
    ("run --set data.samples_per_device=[1,2]", "data.samples_per_device lists 2 sizes for 4 devices"),
    ("compare --methods fl,fedsgd", "'fedsgd' is not a method; there are fl, sl, sfl, sfl2, pipar"),
    ("compare --methods ,", "--methods is empty; the methods are fl"),
    ("compare --timing-only --methods fl,sl --set server.aggregator=median", "sl trains one device at a time"),
    # optimisers
    ("run --set optimizer.name=adm", "optimizer.name = 'adm' is not known (did you mean 'adam'?); allowed are sgd,"),
    ("plan --set optimizer.name=lbfgs", "optimizer.name = 'lbfgs' cannot be used: it evaluates the loss several times"),
    ("run --set optimizer.betas=[0.9,0.99]", "optimizer.betas = [0.9, 0.99] is not an argument of sgd: it has"),
    ("run --set optimizer.name=adam --set optimizer.betas=0.9", "adam takes a list of 2 numbers."),
    (
        "run --virtual --set optimizer.name=adam --set optimizer.betas=[2,0.9]",
        "optimizer.name = 'adam' cannot be made: ValueError: Invalid beta parameter at index 0: 2",
    ),
    ("run --virtual --set optimizer.name=muon", "optimizer.name = 'muon' cannot be made: ValueError: Muon only"),
    (
        "run --virtual --set optimizer.factory=own_models:couples",
        "an optimiser that couples parameters cannot train a network with layers on two machines.",
    ),
    (
        "run --virtual --set optimizer.factory=own_models:lbfgs",
        "returned LBFGS, which evaluates the loss several times",
    ),
    ("run --virtual --set optimizer.factory=own_models:number", "is of type int, not a function: name a function."),
    ("run --set optimizer.factory=a:b --set optimizer.learning_rate=1", "optimizer.learning_rate is given with"),
    ("run --virtual --set optimizer.factory=own_models:noted", "as str, but only tensors and numbers can be moved"),
    ("run --virtual --set optimizer.factory=own_models:nothing", "returned NoneType, not a torch.optim.Optimizer."),
    (
        "run --virtual --set optimizer.factory=own_models:first_only",
        "must give every parameter to its optimiser exactly once.",
    ),
    ("run --set optimizer.factory=a:b --set optimizer.groups=[{match=['x']}]", "optimizer.groups is given with"),
    ("run --set optimizer.clip_norm=0", "optimizer.clip_norm = 0 is not allowed: it should be greater than 0"),
    (
        "run --set optimizer.state_at_aggregation=keep --set optimizer.momentum_at_aggregation=reset",
        "is the former name of optimizer.state_at_aggregation, which is 'keep': give only the latter.",
    ),
    (
        "run --set optimizer.state_at_aggregation=keep --set privacy.noise_multiplier=1",
        "optimizer.state_at_aggregation = 'keep' cannot be combined with noise on updates",
    ),
    (
        "run --set optimizer.name=adagrad --set optimizer.schedule=onecycle",
        "adagrad has neither: set optimizer.scheduling.cycle_momentum = false.",
    ),
    ("run --set optimizer.schedule=cosin", "optimizer.schedule = 'cosin' is not known (did you mean 'cosine'?)"),
    ("run --set optimizer.schedule=step", "optimizer.schedule = 'step' needs optimizer.scheduling.step_size"),
    ("run --set optimizer.schedule=cosine --set optimizer.scheduling.gamma=1", "does not belong to the schedule"),
    (
        "plan --set optimizer.schedule=onecycle --set optimizer.scheduling.steps=3",
        "optimizer.scheduling.steps = 3, but device-1 takes",
    ),
    ("plan --set optimizer.warmup=1000", "optimizer.warmup = 1000, but device-1 takes only"),
    (
        "run --virtual --set optimizer.schedule=own_models:rises",
        "optimizer.schedule 'own_models:rises' returned -1.0 for step 0",
    ),
    (
        "run --method sl --set optimizer.clip_norm=1",
        "needs a server-side model for each device, but in 'sl' all devices",
    ),
    ("compare --timing-only --methods fl,sfl2 --set optimizer.clip_norm=1", "but in 'sfl2' all devices share one"),
    (
        "run --set optimizer.clip_norm=1 --set privacy.noise_multiplier=1",
        "devices would send the norms of their gradients without noise. Write 'side'.",
    ),
    (
        "run --virtual --set optimizer.groups=[{match=['head.*']}]",
        "optimizer.groups has 'head.*', which matches no parameter of the network: its parameters are",
    ),
    ("run --set server.aggregator=best", "server.aggregator = 'best' is not known"),
    ("run --set server.aggregator=krum", "krum with byzantine = 1 needs at least 5 devices, but there are 4"),
    ("run --set server.aggregation.trim=0.1", "server.aggregation.trim = 0.1 does not belong to fedavg"),
    ("profile --budget 0", "--budget"),
    ("profile --memory much", "'much' is not a size; write it like '1GiB'"),
    ("profile --memory 0MB", "--memory 0MB is too small; give a size above 0"),
    ("profile --memory 1MB", "memory"),
    ("profile -o nowhere/profile.json", "Cannot write nowhere/profile.json"),
    ("data get cifar", "There is no dataset 'cifar': choose one of digits, mnist"),
    # plans
    ("run --virtual --split-point 6", "Split point 6 is outside 1..5: vgg5 has 5 layers"),
    ("run --virtual --split-point 0", "plan.split_point = 0 is less than 1"),
    ("run --virtual --split-point soon", "plan.split_point = 'soon' is neither 'auto' nor a whole number"),
    ("run --virtual --micro-batches 101", "101 micro-batches are outside 1..100: a batch has 100 samples"),
    ("run --virtual --micro-batches 0", "plan.micro_batches = 0 is less than 1"),
    ("run --timing-only --micro-batches -2", "plan.micro_batches = -2 is less than 1"),
    ("compare --virtual --split-point 6 --methods fl,pipar", "Split point 6 is outside 1..5"),
    ("plan --split-point 6", "Split point 6 is outside 1..5: vgg5 has 5 layers"),
    ("plan --estimate guess", "plan.estimate = 'guess' is not known; allowed are simulation, paper"),
    ("plan --profile gone.json", "gone.json"),
    ("plan --profile torn.toml", "torn.toml is not a profile"),
    ("plan --set devices.profile=nobodys-board", "nobodys-board"),
    ("plan --set devices.memory=100MB", "device-1 has 95 MiB of memory, but its smallest allowed plan"),
    ("plan --json --micro-batches 101", "101 micro-batches are outside 1..100"),
    ("plan gone.toml", "Cannot read the configuration gone.toml"),
    ("plan --exhaustive --devices 5 --set data.samples_per_device=[10,110,210,310,410]", "of 5 kinds of devices"),
    # sizes
    (f"{MNIST_LIKE} --model vgg16", "vgg16"),
    ("run --virtual --set model.factory=own_models:wrong_classes", "but 10 classes need (2, 10)"),
    ("run --virtual --set model.factory=own_models:wrong_input", "The model does not take inputs of 1x32x32"),
    ("run --virtual --set model.factory=own_models:not_a_module", "is of type str, but it must be a torch.nn.Module"),
    ("run --virtual --set model.factory=own_models:branching", "Branching cannot be cut, because torch.export cannot"),
    ("run --virtual --set model.weights=gone.safetensors", "'gone.safetensors' cannot be read: No such file"),
    ("run --virtual --set model.weights=torn.toml", "model.weights = 'torn.toml' is not a safetensors file: write one"),
    (
        "run --virtual --set model.weights=other.safetensors",
        "model.weights = 'other.safetensors' does not fit the network: the file has no 'conv1.",
    ),
    ("run --virtual --set data.samples_per_device=1000", "There are 1197 training samples, but 4 devices need 4000"),
    ("run --timing-only --set data.samples_per_device=1000", "4000 samples are requested, but digits has 1197"),
    (
        "run --speed 2",
        "device-1 has speed 2, but real processes cannot be faster than this machine: give a speed of at most 1",
    ),
    (
        "run --set server.speed=2",
        "The server has speed 2, but real processes cannot be faster than this machine: give a speed of at most 1",
    ),
    ("run --virtual --set model.norm=batch --set run.batch_size=1", "device-1 would train on a single sample"),
    ("run --timing-only --set model.norm=batch --set run.batch_size=1", "device-1 would train on a single sample"),
    (
        "run --virtual --set model.norm=batch --set data.samples_per_device=[5,1,5,5]",
        "device-2 would train on a single sample, but batch normalisation needs at least 2",
    ),
    ("run --virtual --set model.factory=own_models:batch_norm --set run.batch_size=1", "train on a single sample"),
    ("run --timing-only --data mnist --set data.shape=[3,64,64]", "mnist has images of (1, 28, 28)"),
    ("run --timing-only --data tiny_imagenet --set data.classes=300", "tiny_imagenet has 200 classes"),
    ("run --timing-only --set data.validation=1700 --set data.test=98", "digits has 1797 samples to hold out"),
    ("run --timing-only --devices 2000", "2000 devices share 1197 training samples, but each needs at least 1"),
    # tasks and metrics
    ("run --virtual --set task.loss=hinge", "task.loss = 'hinge' is not a loss; there are cross_entropy, nll"),
    ("run --virtual --set task.loss=own_losses:mine", "no module 'own_losses' is installed"),
    ("run --virtual --set task.class_weights=3", "task.class_weights = 3 is not a list of weights"),
    ("run --virtual --set task.class_weights=[1.0,-2.0]", "is not a list of weights"),
    ("run --virtual --set task.class_weights=none", "as in [1.0, 6.5], or remove the key for none"),
    ("run --virtual --set task.class_weights=[1.0,2.0]", "10 classes, but task.class_weights has 2 numbers"),
    ("run --virtual --set task.label_smoothing=1.5", "task.label_smoothing = 1.5 is not allowed"),
    (f"{NUMBERS} --set task.label_smoothing=0.1", "task.label_smoothing is for the loss cross_entropy and next_token"),
    (f"{NUMBERS} --set task.class_weights=[1.0]", "task.class_weights is for the loss cross_entropy and nll"),
    (f"{NUMBERS} --set task.count=own_models:no_number", "task.count is for a loss of your own"),
    (
        "run --timing-only --set task.loss=mse",
        "task.loss = 'mse' does not fit digits, which has a label for each sample",
    ),
    ("run --virtual --set task.loss=mse", "to (2, 10), but their targets have (2,): change its last layer"),
    (f"{NUMBERS} --set model.factory=own_models:five", "to (2, 5), but their targets have (2,): change its last layer"),
    (f"{OWN_DATA}:numbers", "has the target"),
    (f"{OWN_DATA}:two_targets --set task.loss=mse", "several targets for a sample, but mse takes one tensor"),
    (f"{OWN_DATA}:not_alike --set task.loss=mse", "all items must have one dtype and shape"),
    (f"{OWN_DATA}:untold --set task.loss=mse", "has no target, which only the loss next_token can do without"),
    (f"{OWN_DATA}:untold --set task.loss=next_token", "its next tokens are not known: its sample must be one row of"),
    (f"{OWN_DATA}:far --set task.loss=mse", "has targets that are infinite or not a number"),
    (
        f"{NUMBERS} --set data.factory=own_models:labelled --set task.loss=bce",
        "has targets outside 0..1, which bce needs",
    ),
    (
        f"{NUMBERS} --set data.partition=dirichlet --set privacy.label_epsilon=1.0",
        "privacy.label_epsilon randomises one",
    ),
    (
        "run --virtual --set task.class_weights=[1,1,1,1,1,1,1,1,1,2] --set privacy.label_epsilon=1.0",
        "without class_weights",
    ),
    (f"{NUMBERS} --set task.loss=own_models:no_number", "returns a tensor of (2, 1): it must return one number"),
    (f"{NUMBERS} --set task.loss=own_models:failing", "cannot be computed: ValueError: not today"),
    ("run --virtual --set task.metrics=f1", "task.metrics = 'f1' is not a list of metrics"),
    ('run --virtual --set task.metrics=["f2"]', "names 'f2', which is not a metric; there are accuracy, precision"),
    ('run --virtual --set task.metrics=["f1","f1"]', "has 'f1' twice"),
    (f'{NUMBERS} --set task.metrics=["auroc"]', "task.metrics names 'auroc', which compares classes, but the loss mse"),
    (f'{NUMBERS} --set task.metrics=["perplexity"]', "'perplexity', which compares classes, but the loss mse"),
    ('run --virtual --set task.metrics=["r2"]', "which compares numbers, but the loss cross_entropy"),
    (f'{NUMBERS} --set task.metrics=["own_models:no_number"]', "returns a Tensor: it must return one number"),
    (f'{NUMBERS} --set task.metrics=["own_models:failing"]', "The metric failing cannot be computed: ValueError"),
    # patience without validation
    ("run --virtual --set run.patience=2 --set data.validation=0", "run.patience = 2 needs a validation set"),
    ("run --set run.patience=2 --set data.factory=own_models:no_held_out", "run.patience = 2 needs a validation set"),
    ("run --timing-only --set run.patience=2", "run.patience = 2 needs validation losses"),
    ("run --virtual --set run.keep=best --set data.validation=0", "run.keep = 'best' needs a validation set"),
    ("run --timing-only --set run.keep=best", "run.keep = 'best' needs validation losses"),
    ("run --virtual --set run.keep=first", "run.keep = 'first'"),
    ("run --virtual --set run.local_epochs=0", "run.local_epochs = 0"),
    ("run --virtual --set run.devices_per_round=0.0", "run.devices_per_round = 0"),
    ("run --virtual --set run.devices_per_round=5", "[[devices]] has only 4"),
    ("run --virtual --set run.devices_per_round=2 --set server.min_devices=3", "fewer than server.min_devices = 3"),
    (
        "run --virtual --set run.devices_per_round=2 --set optimizer.state_at_aggregation=keep",
        "'keep' cannot be combined with run.devices_per_round: the server keeps nothing of devices that are not drawn.",
    ),
    ("run --virtual --set run.monitor=f1", "run.monitor = 'f1' is neither 'val_loss' nor a metric of this training"),
    # devices that may not take part
    ("run --virtual --set server.allow=['device-1']", "server.allow does not name 'device-2', which is in [[devices]]"),
    ("run --timing-only --set server.allow=nobody.txt", "Cannot read the names of the devices that may take part"),
    # samples that the network does not take
    (f"{OWN_ENCODER} data.factory=own_models:tokens", "there is no 'attention_mask'. Give the names that it takes"),
    (f"{OWN_ENCODER} data.factory=own_models:no_held_out", "The model does not take inputs of 1x32x32"),
    (
        f"{OWN_ENCODER} data.factory=own_models:masked_tokens",
        "The model does not take inputs of attention_mask 5, input_ids 5",
    ),
    ("run --virtual --set data.factory=own_models:tokens", "Samples are input_ids 5 (int64), token_types 5, but this"),
    (
        f"{OWN_ENCODER} data.factory=own_models:tokens --set privacy.pixel_epsilon=1 --set privacy.pixel_delta=1e-5",
        "privacy.pixel_epsilon adds noise to pixels",
    ),
    # missing objects and files
    ("run --set model.factory=own_models:nobody", "own_models has no 'nobody'"),
    ("run --set model.factory=own_models:number", "is of type int, not a function"),
    ("run --set model.factory=no_such_module:f", "no module 'no_such_module'"),
    ("run --set model.factory=own_models", "is not of the form 'package.module:function'"),
    ("run --set server.aggregator=own_models:nobody", "own_models has no 'nobody'"),
    ("run --set server.aggregator=own_models:wrong_input", "without the method aggregate(before, models, parameters)"),
    (
        "run --virtual --set server.aggregator=own_models:wrong_input --set server.aggregation.size=3",
        "raised TypeError: wrong_input() got an unexpected keyword argument 'size'",
    ),
    ("run gone.toml", "Cannot read the configuration gone.toml"),
    ("run .", "Cannot read the configuration ."),
    ("run torn.toml", "torn.toml is not valid TOML"),
    ("run table.toml --speed 0.5", "write [[devices]] with its keys below it"),
    (
        "run --virtual --set server.profile=gone.json --set devices.profile=gone.json",
        "Cannot read the profile gone.json",
    ),
    ("run --virtual --set server.profile=torn.toml --set devices.profile=torn.toml", "torn.toml is not a profile"),
    ("run --virtual --data mnist --set data.path=empty", "mnist is not complete in empty/MNIST/raw"),
    ("run --virtual --data mnist --set data.path=empty", "Run `pipar data get mnist --path empty`, or give the folder"),
]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds a made-up profile of VGG-5 on digits: nothing is measured here."""
    folder = tmp_path_factory.mktemp("cache")
    layer = LayerProfile("layer", (0.0, 0.01), (0.0, 0.02), output_bytes=4096, parameter_bytes=4096)
    made = Profile("vgg5", "float32", (1, 100), (layer,) * 5)
    keep_profile(profile_key(Config(), (1, 32, 32), 10), made, folder / "pipar" / "profiles")
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module of factories and a truncated file; runs go to `runs` in it."""
    (tmp_path / "own_models.py").write_text(FACTORIES, "utf-8")
    (tmp_path / "torn.toml").write_text(TORN, "utf-8")
    (tmp_path / "other.safetensors").write_bytes(OTHER_WEIGHTS)
    (tmp_path / "table.toml").write_text("[devices]\ncount = 3\n", "utf-8")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("own_models", None)


def _check(code: object, out: str, err: str, says: str, runs: Path) -> None:
    assert says in err
    assert code == 2
    assert out == ""
    # Without a terminal, the first line names what starts.
    starting = tuple(f"pipar {name}: preparing " for name in ("run", "compare", "plan", "profile"))
    (sentence,) = [line for line in err.splitlines() if not line.startswith(starting)]
    assert err.splitlines()[-1] == sentence
    assert "Traceback" not in err
    assert "Usage:" not in err
    assert not runs.exists() or not list(runs.iterdir())


#: The first needs torch.export, the second hundreds of simulations.
SLOW = ("model.factory=own_models:branching", "plan --exhaustive --devices 5")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        pytest.param(*one, id=one[0], marks=pytest.mark.slow if any(words in one[0] for words in SLOW) else ())
        for one in COMMANDS
    ],
)
def test_bad_input_is_one_sentence(command: str, says: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    captured = capfd.readouterr()
    _check(ended.value.code, captured.out, captured.err, says, place / "runs")


@pytest.mark.parametrize("command", ["run --json --virtual --split-point 6", "compare --json --methods none"])
def test_bad_input_leaves_standard_output_empty_for_machines(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    captured = capfd.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)


def test_a_port_in_use_is_found_before_anything_starts(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SystemExit) as ended:
            main(["run", "--set", f"server.listen={address}"])
    captured = capfd.readouterr()
    says = f"Cannot listen on {address}: address already in use."
    _check(ended.value.code, captured.out, captured.err, says, place / "runs")


@pytest.mark.slow
def test_a_folder_that_cannot_be_created_is_named(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "runs").write_text("a file where the folder would be", "utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--timing-only"])
    assert ended.value.code == 2
    assert "Cannot make the run's folder" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "says"), [("runn", "is not a command"), ("run --virtual --micro-batches 101", "outside 1..100")]
)
def test_the_installed_program_prints_the_same(command: str, says: str, place: Path) -> None:
    program = [sys.executable, "-m", "pipar", *command.split()]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    _check(done.returncode, done.stdout, done.stderr, says, place / "runs")
