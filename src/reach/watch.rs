//! The side that keeps asking: whether members that were reached still answer.

use super::knock::Visit;
use crate::secret::Secret;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Questions to each member per limit.
const QUESTIONS: u32 = 4;
/// Time between two attempts to connect, where a new connection breaks.
const RETRY: Duration = Duration::from_millis(50);
/// Stack of a thread that asks.
const STACK_BYTES: usize = 64 << 10;

/// Threads that ask members, again and again, until one falls silent.
///
/// A process that ends is noticed at once, as the system closes its connections, between two questions, too; one that is stopped, whose host is gone or that is cut
/// off within the limit.
#[derive(Debug)]
pub struct Watch(Arc<Shared>);

/// What ends a watch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Members that no longer answer: the first one, then others that have missed an answer, too.
    pub silent: Vec<String>,
    /// Whether the process of the first one has ended, as its host says.
    pub has_ended: bool,
    /// A member that has waited in vain in the group; then nobody is silent.
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
    /// The connection to each member, for [`Watch::stop`] to end the wait for its closing.
    connections: Vec<Option<TcpStream>>,
    seen: Seen,
    is_over: bool,
}

impl Watch {
    /// Watches the other members of a group: their ids and the addresses of their doors, `host:port`.
    ///
    /// A thread that the system has no room for watches nobody: a collective waits longer for that member, no more.
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
            seen: Seen::default(),
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
                .name("evermoe-watch".into())
                .stack_size(STACK_BYTES)
                .spawn(move || ask(&shared, member));
        }
        Self(shared)
    }

    /// Waits until a member falls silent, or has waited in vain itself. Nothing is seen once the watch is stopped.
    ///
    /// ```
    /// use evermoe::reach::{Door, Watch};
    /// use std::time::Duration;
    /// let door = Door::open("a", None, None)?;
    /// let watch = Watch::start(vec![("a".into(), format!("127.0.0.1:{}", door.port()))], 1, Duration::from_secs(1), None);
    /// drop(door);
    /// assert_eq!(watch.wait().silent, ["a"]);
    /// # Ok::<(), evermoe::Error>(())
    /// ```
    pub fn wait(&self) -> Seen {
        let mut state = self.0.lock();
        while !state.is_over {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.seen.clone()
    }

    /// Ends the watch: nobody is asked again.
    pub fn stop(&self) {
        let mut state = self.0.lock();
        state.is_over = true;
        for connection in state.connections.iter_mut().filter_map(Option::take) {
            // One that is closed already has nobody waiting for it.
            let _closed = connection.shutdown(Shutdown::Both);
        }
        drop(state);
        self.0.changed.notify_all();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns before the next attempt to connect, or at once when the watch is over. Whether it is over.
    fn pause(&self) -> bool {
        let pause = RETRY.min(self.limit / QUESTIONS);
        let waited = self.changed.wait_timeout_while(self.lock(), pause, |state| !state.is_over);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_over
    }

    /// Returns before the next question, or at once when the member closes the connection or the watch is over. Whether it
    /// is over.
    fn pause_unless_closed(&self, member: usize, visit: &Visit) -> bool {
        {
            let mut state = self.lock();
            if state.is_over {
                return true;
            }
            state.connections[member] = visit.connection();
        }
        visit.wait_closed(self.limit / QUESTIONS);
        let mut state = self.lock();
        state.connections[member] = None;
        state.is_over
    }

    fn fell_silent(&self, member: usize, has_ended: bool) {
        let state = self.lock();
        let missed = |&other: &usize| other != member && state.heard[other].elapsed() > self.limit / 2;
        let others = (0..self.members.len()).filter(missed);
        let silent = std::iter::once(member).chain(others).map(|each| self.members[each].0.clone()).collect();
        self.report(state, Seen { silent, has_ended, gave_up: None });
    }

    fn report(&self, mut state: MutexGuard<'_, State>, seen: Seen) {
        if !state.is_over {
            (state.seen, state.is_over) = (seen, true);
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// Asks one member until it falls silent or the watch is over.
fn ask(shared: &Shared, member: usize) {
    let (id, address) = &shared.members[member];
    let mut visit: Option<Visit> = None;
    loop {
        // Who was stopped itself asks once more before it takes others for silent.
        let deadline =
            (shared.lock().heard[member] + shared.limit).max(Instant::now() + shared.limit / QUESTIONS);
        let is_new = visit.is_none();
        let open = visit.take().map_or_else(|| Visit::begin(address, deadline), Ok);
        match open
            .and_then(|mut open| open.knock(id, deadline, shared.secret.as_ref()).map(|said| (open, said)))
        {
            Ok((_, said)) if said.gave_up == shared.group => {
                return shared.report(shared.lock(), Seen { gave_up: Some(id.clone()), ..Seen::default() });
            }
            Ok((open, _)) => {
                shared.lock().heard[member] = Instant::now();
                let asked = Instant::now();
                if shared.pause_unless_closed(member, &open) || (asked.elapsed() < RETRY && shared.pause()) {
                    return;
                }
                visit = Some(open);
            }
            // A connection may break for other reasons; one that is refused means that the process has ended.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                return shared.fell_silent(member, true);
            }
            Err(_) if Instant::now() >= deadline => return shared.fell_silent(member, false),
            Err(_) if is_new && shared.pause() => return,
            Err(_) => {}
        }
    }
}
