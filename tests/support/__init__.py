"""What tests of several packages share. A test module imports from here, never from another test module.

How tests run:
    surroundings        signals and variables of a plain terminal, however the tests were started
    waiting             the one limit for waiting in real time, and `until`
    hangs               ends a run in which several tests hang
    programs, zygote    `pipar` commands as real processes: started fast, waited for, always ended
    browser             the system's Chromium, and the errors of a page in it
    document_blocks     the blocks of code in the documents, and a reader that runs them
    stand_in            the rules of an accelerator with the numbers of the CPU
    interleaving        actions of another thread at a given moment, without a second thread
    memory_peak         how much memory a call takes

Small things to train, plan and send:
    training            workloads, profiles made by hand, trainings in virtual time
    labels              labels in messages
    networks            networks that are no nn.Sequential
    families            networks of known families, as their libraries write them
    texts               samples that are integers, tuples and dictionaries, and networks that take them
    over_grpc           the same trainings over gRPC
    roaming, cutting    the same over links that are lost and restored
    hostile             devices whose messages are tampered with
    quiet_worlds        worlds of the fault simulation with only the faults of a test
    server_world        a server in virtual time, with devices that are honest, scripted or lose their links
    recorded            trainings in virtual time that are recorded
    deployments, gated  a training for real processes that can be held in mid-epoch
    small_runs, made_up_cells   runs and cells of the reproduction that take no time
    random_jobs         jobs of random devices, for simulations
    hand_made_job       a job of two devices, for what is written about a run
    fleets, leakages    fleets to plan for, and leakage tables
    credentials         certificates and tokens
    strangers           other programs that answer at the address of a server

Second implementations to compare with:
    reference           every training method, from its definition
    plain_aggregators   every aggregator, from its paper
    plain_optimizers    federated learning with any optimiser, as a plain loop
    recursion           when each stage of an iteration ends, by the definition of the stage graph
"""
