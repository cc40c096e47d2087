"""Every setting of a launch: its flag, its key in the configuration file, its variable, its values.

One table, so that the flags, the file, the environment of the script, ``--dry-run`` and the
questions of ``anydevice config`` cannot disagree. Names are those of Accelerate's launcher and of
its configuration file, so scripts and files carry over.
"""

from __future__ import annotations

from typing import Final

from anydevice.launch.engine_table import DEEPSPEED, DYNAMO, FSDP, PARALLELISM
from anydevice.launch.megatron_table import MEGATRON
from anydevice.launch.settings import Setting

__all__ = ["BY_NAME", "SETTINGS"]

_S = Setting
_COMMON = (
    _S(
        "config_file",
        "text",
        "a file that `anydevice config` writes",
        reads=("ANYDEVICE_CONFIG_FILE",),
    ),
    _S(
        "num_processes",
        "int",
        "of all machines; by default one a device",
        keys=("num_processes",),
        reads=("WORLD_SIZE",),
        least=1,
    ),
    _S(
        "device_type",
        "text",
        "such as cpu; by default the accelerator",
        keys=("device_type",),
        variable="ACCELERATE_TORCH_DEVICE",
    ),
    _S(
        "cpu",
        "flag",
        "train on the host, as --device_type cpu",
        keys=("use_cpu",),
        variable="ACCELERATE_USE_CPU",
    ),
    _S("multi_gpu", "flag", "train on this machine's accelerators"),
    _S(
        "mixed_precision",
        "choice",
        "compute in half precision",
        keys=("mixed_precision",),
        variable="ACCELERATE_MIXED_PRECISION",
        choices=("no", "fp16", "bf16"),
        default="no",
    ),
    _S(
        "gradient_accumulation_steps",
        "int",
        "batches before each step",
        keys=("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps"),
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        least=1,
    ),
    _S(
        "num_machines",
        "int",
        "machines that take part",
        keys=("num_machines",),
        reads=("SLURM_STEP_NUM_NODES",),
        least=1,
        default=1,
    ),
    _S(
        "machine_rank",
        "int",
        "the number of this machine, from 0",
        keys=("machine_rank",),
        reads=("NODE_RANK", "SLURM_NODEID"),
        least=0,
        default=0,
    ),
    _S(
        "main_process_ip",
        "text",
        "address of machine 0",
        keys=("main_process_ip",),
        reads=("MASTER_ADDR",),
    ),
    _S(
        "main_process_port",
        "int",
        "port of machine 0; 0 takes any that is free",
        keys=("main_process_port",),
        reads=("MASTER_PORT",),
        least=0,
        most=65535,
    ),
    _S("use_fsdp", "flag", "shard the model over the processes", variable="ACCELERATE_USE_FSDP"),
    _S(
        "use_deepspeed",
        "flag",
        "train with DeepSpeed (an optional package)",
        variable="ACCELERATE_USE_DEEPSPEED",
    ),
    _S(
        "use_megatron_lm",
        "flag",
        "train with Megatron-LM (an optional package)",
        variable="ACCELERATE_USE_MEGATRON_LM",
    ),
    _S("module", "flag", "the script is a module, as for python -m", short="-m"),
    _S("no_python", "flag", "the script is a program, not run by Python"),
    _S("dry_run", "flag", "print what would run, and from where"),
    _S("json", "flag", "with --dry-run: print JSON"),
    _S("help", "flag", "show this text", short="-h"),
    _S("help_all", "flag", "show all options: FSDP, DeepSpeed, others"),
    _S("quiet", "flag", "print no summary when the script fails", short="-q"),
    _S(
        "debug",
        "flag",
        "check collective calls; show every traceback",
        keys=("debug",),
        variable="ACCELERATE_DEBUG_MODE",
    ),
)
_RUN = (
    _S(
        "gpu_ids",
        "text",
        "the devices of this machine to use, such as 0,2; or all",
        "processes",
        keys=("gpu_ids",),
    ),
    _S(
        "num_cpu_threads_per_process",
        "int",
        "threads of each process; by default the cores divided by the processes",
        "processes",
        keys=("num_cpu_threads_per_process", "mpirun_config.num_cpu_threads_per_process"),
        variable="OMP_NUM_THREADS",
        least=1,
    ),
    _S(
        "enable_cpu_affinity",
        "flag",
        "keep each process on the cores near its device",
        "processes",
        keys=("enable_cpu_affinity",),
        variable="ACCELERATE_CPU_AFFINITY",
    ),
    _S(
        "rdzv_backend",
        "text",
        "how machines find each other: static, or c10d for restarts and joining",
        "processes",
        keys=("rdzv_backend",),
        default="static",
    ),
    _S("rdzv_conf", "text", "more for the rendezvous: key=value,...", "processes"),
    _S(
        "rdzv_id", "text", "the job's name for the rendezvous", "processes", reads=("SLURM_JOB_ID",)
    ),
    _S(
        "max_restarts",
        "int",
        "restart all processes at most this many times after a failure",
        "processes",
        keys=("max_restarts",),
        least=0,
        default=0,
    ),
    _S(
        "monitor_interval",
        "float",
        "seconds between looks at the processes",
        "processes",
        keys=("monitor_interval",),
        least=0.0,
        default=0.1,
    ),
    _S(
        "save_state_alone",
        "flag",
        "the main process calls save_state by itself, and waits for no other",
        "processes",
        keys=("save_state_alone",),
        variable="ANYDEVICE_SAVE_STATE_ALONE",
    ),
    _S("role", "text", "a name for the processes, in the launcher's log", "processes"),
    _S(
        "tee",
        "text",
        "write output to files and the terminal: 1 out, 2 err, 3 both",
        "processes",
        short="-t",
    ),
    _S("log_dir", "text", "the folder of those files", "processes", keys=("log_dir",)),
    _S(
        "same_network",
        "flag",
        "accepted without effect",
        "processes",
        keys=("same_network",),
        unused="machines find each other by --main_process_ip and --rdzv_backend",
    ),
    _S(
        "main_training_function",
        "text",
        "accepted without effect",
        "processes",
        keys=("main_training_function",),
        unused="the script is run as it stands, from its top",
    ),
)
#: All settings, in the order of ``--help``.
SETTINGS: Final = (*_COMMON, *_RUN, *DYNAMO, *FSDP, *DEEPSPEED, *MEGATRON, *PARALLELISM)
BY_NAME: Final = {setting.name: setting for setting in SETTINGS}
