//! Failure detection: probes connected members until one stops answering.

use super::probe::Probe;
use crate::secret::Secret;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Number of probes of each member per limit.
const PROBES: u32 = 4;
/// Time between two attempts to connect when new connections break.
const RETRY: Duration = Duration::from_millis(50);
/// Stack size of a probing thread.
const STACK_BYTES: usize = 64 << 10;

/// Threads that probe the members of a group until one stops answering.
///
/// The end of a process is noticed at once, also between two probes, because the kernel closes its connections. A stopped
/// process, a lost host or a network partition closes none, so that only a missing answer shows it, within the limit.
#[derive(Debug)]
pub struct FailureDetector(Arc<Shared>);

/// The reason why a [`FailureDetector`] ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finding {
    /// Members that no longer answer: the one noticed first, then others that have missed an answer.
    pub silent: Vec<String>,
    /// Whether the process of the first one has ended, as reported by its host.
    pub has_ended: bool,
    /// A member whose wait in the group timed out; `silent` is empty then.
    pub gave_up: Option<String>,
}

#[derive(Debug)]
struct Shared {
    members: Vec<(String, String)>,
    group: u64,
    limit: Duration,
    secret: Option<Secret>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// When each member answered last.
    heard: Vec<Instant>,
    /// Connections to the members, by which [`FailureDetector::stop`] ends waits.
    connections: Vec<Option<TcpStream>>,
    finding: Finding,
    is_over: bool,
}

impl FailureDetector {
    /// Starts to probe the other members of a group, given by id and address of the probe server, `host:port`.
    ///
    /// If the system cannot start a thread, its member is not probed: its failure is then noticed only by the timeout of a
    /// collective.
    pub fn start(
        members: Vec<(String, String)>,
        group: u64,
        limit: Duration,
        secret: Option<&Secret>,
    ) -> Self {
        let secret = secret.cloned();
        let state = State {
            heard: vec![Instant::now(); members.len()],
            connections: members.iter().map(|_| None).collect(),
            finding: Finding::default(),
            is_over: false,
        };
        let shared = Arc::new(Shared {
            members,
            group,
            limit,
            secret,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        for member in 0..shared.members.len() {
            let shared = shared.clone();
            let _started = thread::Builder::new()
                .name("evermoe-detector".into())
                .stack_size(STACK_BYTES)
                .spawn(move || probe_member(&shared, member));
        }
        Self(shared)
    }

    /// Waits until a member stops answering or reports that its own wait timed out. Returns an empty finding once the
    /// detector is stopped.
    ///
    /// ```
    /// use evermoe::reachability::{FailureDetector, ProbeServer};
    /// use std::time::Duration;
    /// let server = ProbeServer::open("a", None, None)?;
    /// let members = vec![("a".into(), format!("127.0.0.1:{}", server.port()))];
    /// let detector = FailureDetector::start(members, 1, Duration::from_secs(1), None);
    /// drop(server);
    /// assert_eq!(detector.wait().silent, ["a"]);
    /// # Ok::<(), evermoe::Error>(())
    /// ```
    pub fn wait(&self) -> Finding {
        let mut state = self.0.lock();
        while !state.is_over {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.finding.clone()
    }

    /// Stops probing and ends all waits.
    pub fn stop(&self) {
        let mut state = self.0.lock();
        state.is_over = true;
        for connection in state.connections.iter_mut().filter_map(Option::take) {
            // An error means that it is closed already.
            let _closed = connection.shutdown(Shutdown::Both);
        }
        drop(state);
        self.0.changed.notify_all();
    }
}

impl Drop for FailureDetector {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until the next attempt to connect, or until the detector is stopped; returns whether it is stopped.
    fn pause(&self) -> bool {
        let pause = RETRY.min(self.limit / PROBES);
        let waited = self.changed.wait_timeout_while(self.lock(), pause, |state| !state.is_over);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_over
    }

    /// Sleeps until the next probe, the end of the connection or the end of the detector; returns whether it is stopped.
    fn pause_unless_closed(&self, member: usize, probe: &Probe) -> bool {
        {
            let mut state = self.lock();
            if state.is_over {
                return true;
            }
            state.connections[member] = probe.connection();
        }
        probe.wait_closed(self.limit / PROBES);
        let mut state = self.lock();
        state.connections[member] = None;
        state.is_over
    }

    fn fell_silent(&self, member: usize, has_ended: bool) {
        let state = self.lock();
        let missed = |&other: &usize| other != member && state.heard[other].elapsed() > self.limit / 2;
        let others = (0..self.members.len()).filter(missed);
        let silent = std::iter::once(member).chain(others).map(|each| self.members[each].0.clone()).collect();
        self.report(state, Finding { silent, has_ended, gave_up: None });
    }

    fn report(&self, mut state: MutexGuard<'_, State>, finding: Finding) {
        if !state.is_over {
            (state.finding, state.is_over) = (finding, true);
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// Probes one member until it stops answering or the detector is stopped.
fn probe_member(shared: &Shared, member: usize) {
    let (id, address) = &shared.members[member];
    let mut probe: Option<Probe> = None;
    loop {
        // If this process was stopped itself, it probes once more before it reports others as silent.
        let deadline =
            (shared.lock().heard[member] + shared.limit).max(Instant::now() + shared.limit / PROBES);
        let is_new = probe.is_none();
        let open = probe.take().map_or_else(|| Probe::begin(address, deadline), Ok);
        match open
            .and_then(|mut open| open.ask(id, deadline, shared.secret.as_ref()).map(|report| (open, report)))
        {
            Ok((_, report)) if report.gave_up == shared.group => {
                return shared
                    .report(shared.lock(), Finding { gave_up: Some(id.clone()), ..Finding::default() });
            }
            Ok((open, _)) => {
                shared.lock().heard[member] = Instant::now();
                let answered = Instant::now();
                if shared.pause_unless_closed(member, &open) || (answered.elapsed() < RETRY && shared.pause())
                {
                    return;
                }
                probe = Some(open);
            }
            // A connection may break for other reasons; a refused one means that the process has ended.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                return shared.fell_silent(member, true);
            }
            Err(_) if Instant::now() >= deadline => return shared.fell_silent(member, false),
            Err(_) if is_new && shared.pause() => return,
            Err(_) => {}
        }
    }
}
