"""Starting Ray's two daemons that we need, gcs_server and raylet, and none of the five helpers beside them.

Ray's own start adds a dashboard, a log monitor, an autoscaler monitor and two agents: 240 MB and most of its time
(docs/decisions/0003-ray-runtime.md). This file leans on Ray's private parts and on nothing else; whoever calls it is
ready for it to fail on another version of Ray and then starts Ray the public way.
"""

from __future__ import annotations

import time
from typing import Any

import ray._private.services as services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.resource_isolation_config import ResourceIsolationConfig

from k3ray.cluster.ray_directory import SESSION
from k3ray.cluster.ray_settings import SYSTEM, PrivateSettings

LOOPBACK = "127.0.0.1"  # the daemons and workers listen there and nowhere else
REGISTRATION_S = 30.0

# The raylet insists on two agents and ends when one of them does. These wait for the end of their input, which comes
# when the raylet ends. They are only asked for runtime environments and metrics, which we do not use.
AGENT = '/bin/sh -c "exec cat" k3ray-agent'
AGENT_OPTIONS = ("--dashboard_agent_command", "--runtime_env_agent_command")
PORT_OPTIONS = ("--metrics-agent-port", "--metrics_export_port", "--runtime_env_agent_port")
NO_PORT = "1"  # a port at which nobody answers; zero would make the raylet wait until the agent tells its own


class Head(Node):  # type: ignore[misc]  # Ray ships no types for it
    """Ray's node without the helpers.

    Making one starts both daemons and waits until the node has registered, usually a quarter of a
    second; on an error nothing is left running.
    """

    def __init__(self, settings: PrivateSettings) -> None:
        self._workers = settings.workers
        parameters = RayParams(
            num_cpus=settings.cpus,
            num_gpus=0,
            resources={},
            memory=settings.memory_bytes,
            object_store_memory=settings.store_bytes,
            plasma_directory=str(settings.store_directory),
            temp_dir=str(settings.directory),
            session_name=SESSION,
            node_ip_address=LOOPBACK,
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            resource_isolation_config=ResourceIsolationConfig(),
            _system_config=dict(SYSTEM),
        )
        try:
            super().__init__(parameters, head=True, shutdown_at_exit=False, spawn_reaper=False, ray_init_cluster=True)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kills the raylet and the gcs_server: they hold nothing that is to be saved."""
        if hasattr(self, "all_processes"):  # else the start failed before Ray had made it
            self.kill_all_processes(check_alive=False)

    @property
    def driver_address(self) -> str:
        """The address for a driver. Ray takes 127.0.0.1 for the host's outer address, but not its IPv6 notation."""
        return str(self.address).replace(LOOPBACK, f"[::ffff:{LOOPBACK}]")

    def start_api_server(self, **_: Any) -> None:
        self._webui_url = ""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        start_process = services.start_ray_process

        def start_lean(command: list[str], kind: str, **rest: Any) -> Any:
            return start_process(lean_raylet(command, self._workers), kind, **rest)

        services.start_ray_process = start_lean
        try:
            super().start_raylet(*arguments, **options)
        finally:
            services.start_ray_process = start_process
        self._await_registration()

    def _await_registration(self) -> None:
        """Ray would look once and then once a second."""
        raylet = self.all_processes["raylet"][0].process
        deadline = time.monotonic() + REGISTRATION_S
        while not self.get_gcs_client().get_all_node_info(timeout=REGISTRATION_S):
            if raylet.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the raylet ended or did not register")
            time.sleep(0.01)


def lean_raylet(command: list[str], workers: int) -> list[str]:
    """The raylet's command line with idle agents at no port. Raises LookupError where Ray's options have changed."""
    changed = dict.fromkeys(AGENT_OPTIONS, AGENT) | dict.fromkeys(PORT_OPTIONS, NO_PORT)
    changed["--num_prestart_python_workers"] = str(workers)
    lean = []
    for argument in command:
        name = argument.partition("=")[0]
        lean.append(f"{name}={changed.pop(name)}" if name in changed else argument)
    if changed:
        raise LookupError(f"this version of Ray has no option {', '.join(changed)}")
    return [*lean, f"--dashboard_agent_listen_port={NO_PORT}"]
