use super::*;
use crate::connection::Dial;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

fn pool(endpoints: u16, connections: usize) -> Pool {
    let endpoint =
        |port| Endpoint::new(&format!("http://127.0.0.1:{port}"), Dial::Tcp, &mut None, DOWN).unwrap();
    Pool::new(&(1..=endpoints).map(endpoint).collect::<Vec<_>>(), connections)
}

/// To be avoided: these endpoints.
fn tried(numbers: &[usize]) -> Avoid {
    let (at, hint) = (Instant::now(), Duration::ZERO);
    let tried = numbers.iter().map(|&number| Tried { number, at, hint }).collect();
    let order = Order::Any;
    Avoid { tried, order }
}

fn counts(pool: &Pool) -> Vec<usize> {
    pool.slots.iter().map(|slot| slot.calls.open()).collect()
}

#[test]
fn the_least_busy_connection_is_taken() {
    // Scenario: three connections, six leases, then the two of one connection are dropped and two more taken.
    // Expected: two leases on each connection, and both new ones on the one that became free.
    let pool = pool(1, 3);
    let mut leases: Vec<Lease<'_>> = (0..6).map(|_| pool.lease(&Avoid::default())).collect();
    assert_eq!(counts(&pool), [2, 2, 2]);
    leases.retain(|lease| !Arc::ptr_eq(lease.slot, &pool.slots[1]));
    assert_eq!(counts(&pool), [2, 0, 2]);
    leases.push(pool.lease(&Avoid::default()));
    leases.push(pool.lease(&Avoid::default()));
    assert_eq!(counts(&pool), [2, 2, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_begins_with_an_endpoint_lets_all_take_turns_after_that() {
    // Scenario: three endpoints, of which the second is down, refuses calls and was tried; a call that begins with it, and tries
    // each in vain, twice. Expected: the second, the others, and again in the same order.
    let pool = pool(3, 1);
    let of = |number| pool.slots.iter().find(|slot| slot.number == number).unwrap();
    let second = of(1);
    second.reach().redial_at = Some(Instant::now() + DOWN);
    second.reach().has_failed = true;
    second.refused(None);
    let mut avoid = tried(&[1]);
    avoid.begin_with(second);
    let mut order = Vec::new();
    for _ in 0..6 {
        let number = pool.lease(&avoid).slot.number;
        order.push(number);
        avoid.add(of(number), None);
    }
    assert!(
        order == [1, 0, 2, 1, 0, 2] || order == [1, 2, 0, 1, 2, 0],
        "{order:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_is_avoided_or_down_comes_last() {
    // Scenario: two endpoints of two connections each; the first is to be avoided; then the second is down, and then it is
    // not; then both are to be avoided, the first one less. Expected: the second, however busy; the first; both evenly; the
    // first.
    let pool = pool(2, 2);
    let first = pool.slots.iter().position(|slot| slot.number == 0).unwrap();
    let avoid = tried(&[0]);
    let leases: Vec<Lease<'_>> = (0..6).map(|_| pool.lease(&avoid)).collect();
    assert!(leases.iter().all(|lease| lease.slot.number == 1));
    drop(leases);
    let second = pool.slots.iter().find(|slot| slot.number == 1).unwrap();
    second.reach().redial_at = Some(Instant::now() + DOWN);
    second.reach().has_failed = true;
    let leases: Vec<Lease<'_>> = (0..4).map(|_| pool.lease(&Avoid::default())).collect();
    assert!(leases.iter().all(|lease| lease.slot.number == 0) && counts(&pool)[first] == 2);
    drop(leases);
    second.reach().redial_at = None;
    for (avoid, expected) in [(Avoid::default(), [1, 1, 1, 1]), (tried(&[0, 1]), [2, 0, 2, 0])] {
        let leases: Vec<Lease<'_>> = (0..4).map(|_| pool.lease(&avoid)).collect();
        assert_eq!(counts(&pool), expected);
        drop(leases);
    }
}

#[test]
fn a_retry_goes_elsewhere_than_the_attempt_before() {
    // Scenario: two endpoints that fail every attempt of a call; the first at once, so that it is never busy, and the
    // second has other calls. Expected: attempts alternate.
    let pool = pool(2, 1);
    let _busy: Vec<Lease<'_>> = (0..3).map(|_| pool.lease(&tried(&[0]))).collect();
    let mut avoid = Avoid::default();
    let mut attempt = || {
        let lease = pool.lease(&avoid);
        avoid.add(lease.slot, None);
        lease.slot.number
    };
    assert_eq!(std::array::from_fn(|_| attempt()), [0, 1, 0, 1, 0, 1]);
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Endpoints with this many connections each: those that are `None` never answer, the others count their dials and refuse or
/// accept them.
fn pool_of(endpoints: &[Option<bool>], connections: usize) -> (Pool, Vec<Arc<AtomicUsize>>) {
    let (mut made, mut dials) = (Vec::new(), Vec::new());
    for accepts in endpoints.iter().copied() {
        let count = Arc::new(AtomicUsize::new(0));
        dials.push(Arc::clone(&count));
        let dial = Dial::with(move || {
            count.fetch_add(1, Ordering::Relaxed);
            async move {
                match accepts {
                    None => std::future::pending().await,
                    Some(false) => Err(std::io::ErrorKind::ConnectionRefused.into()),
                    Some(true) => {
                        let (near, far) = tokio::io::duplex(1 << 16);
                        tokio::spawn(async move {
                            let mut server = h2::server::handshake(far).await.unwrap();
                            while server.accept().await.is_some() {}
                        });
                        Ok(near)
                    }
                }
            }
        });
        made.push(Endpoint::new("http://h:1", dial, &mut None, CONNECT_TIMEOUT).unwrap());
    }
    (Pool::new(&made, connections), dials)
}

fn head(_: &Endpoint) -> Request<()> {
    Request::post("http://h:1/x").body(()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_refuses_calls_is_better_than_one_that_is_gone() {
    // Scenario: the first endpoint is busy, and has just refused a call; the second one is gone. Expected: the call
    // goes to the first again, and the second is not dialled more than once in a second.
    let (pool, dials) = pool_of(&[Some(true), Some(false)], 1);
    let _busy = pool.call(&mut Avoid::default(), head).await.unwrap();
    for _ in 0..3 {
        let call = pool.call(&mut tried(&[0]), head).await;
        assert_eq!(call.unwrap().0.slot.number, 0);
    }
    assert_eq!(dials[1].load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_takes_no_stream_keeps_no_call_from_the_others() {
    // Scenario: an endpoint whose connections begin with GOAWAY, as those of a server that drains, next to a good one.
    // Expected: each call gets to the good one.
    let drains = Dial::with(|| async {
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        let goaway = [0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        far.write_all(&[&settings[..], &goaway].concat()).await?;
        tokio::spawn(async move { far.read_to_end(&mut Vec::new()).await });
        Ok(near)
    });
    let (good, _) = pool_of(&[Some(true)], 1);
    let drains = Endpoint::new("http://h:1", drains, &mut None, CONNECT_TIMEOUT).unwrap();
    let good = Endpoint::clone(&good.slots[0].endpoint);
    let pool = Pool::new(&[drains, good], 1);
    for _ in 0..4 {
        let call = pool.call(&mut Avoid::default(), head).await;
        assert_eq!(call.unwrap().0.slot.number, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_never_answers_keeps_no_call_from_the_others() {
    // Scenario: an endpoint that takes no connection and refuses none, next to a good one, with three connections to each;
    // calls that wait for less than a connection may take, for as long as three dials. Expected: at most one of them goes
    // to it; it is dialled again after each pause.
    let (pool, dials) = pool_of(&[None, Some(true)], 3);
    let enough = Duration::from_millis(100);
    let (mut held, mut kept) = (0, Vec::new());
    let begin = Instant::now();
    while begin.elapsed() < 3 * (CONNECT_TIMEOUT + DOWN) {
        let mut avoid = Avoid::default();
        match tokio::time::timeout(enough, pool.call(&mut avoid, head)).await {
            Ok(call) => kept.push(call.unwrap()),
            Err(_) => held += 1,
        }
        tokio::time::advance(enough).await;
    }
    assert!(kept.iter().all(|(lease, ..)| lease.slot.number == 1));
    assert!(held <= 1, "{held}");
    let dials = dials[0].load(Ordering::Relaxed);
    assert!((3..=4).contains(&dials), "{dials}");
}

/// An endpoint that takes so many connections and then neither takes nor refuses any; ends those that it has.
fn breakable(most: usize) -> (Endpoint, Arc<Mutex<JoinSet<()>>>) {
    let (dials, servers) = (AtomicUsize::new(0), Arc::new(Mutex::new(JoinSet::new())));
    let running = Arc::clone(&servers);
    let dial = Dial::with(move || {
        let running = Arc::clone(&running);
        let is_lost = dials.fetch_add(1, Ordering::Relaxed) >= most;
        async move {
            if is_lost {
                std::future::pending::<()>().await;
            }
            let (near, far) = tokio::io::duplex(1 << 16);
            running.lock().unwrap().spawn(async move {
                let mut server = h2::server::handshake(far).await.unwrap();
                while server.accept().await.is_some() {}
            });
            Ok(near)
        }
    });
    let endpoint = Endpoint::new("http://h:1", dial, &mut None, CONNECT_TIMEOUT).unwrap();
    (endpoint, servers)
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_whose_connection_ends_is_better_than_one_that_cannot_be_reached() {
    // Scenario: an endpoint that takes no connection and refuses none, next to one whose connection ends, as each does within
    // hours, and that takes another one. Expected: no call waits for the first.
    let (good, servers) = breakable(usize::MAX);
    let (gone, _) = pool_of(&[None], 1);
    let gone = Endpoint::clone(&gone.slots[0].endpoint);
    let pool = Pool::new(&[gone, good], 1);
    let enough = Duration::from_millis(100);
    for dialled in [CONNECT_TIMEOUT, DOWN] {
        pool.connect().await.unwrap();
        // Longer than the dial of the other one may take; then longer than it is not dialled again.
        tokio::time::sleep(dialled).await;
        servers.lock().unwrap().abort_all();
        tokio::task::yield_now().await;
        let mut kept = Vec::new();
        for _ in 0..20 {
            let mut avoid = Avoid::default();
            let call = tokio::time::timeout(enough, pool.call(&mut avoid, head)).await;
            kept.push(call.expect("it waits").unwrap());
        }
        assert!(kept.iter().all(|(lease, ..)| lease.slot.number == 1));
    }
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_is_lost_keeps_no_call_from_the_others() {
    // Scenario: an endpoint whose three connections break, and that takes no other and refuses none, next to a good one.
    // Expected: no call waits for it.
    let (lost, servers) = breakable(3);
    let (good, _) = pool_of(&[Some(true)], 1);
    let good = Endpoint::clone(&good.slots[0].endpoint);
    let pool = Pool::new(&[lost, good], 3);
    pool.connect().await.unwrap();
    servers.lock().unwrap().abort_all();
    let enough = Duration::from_millis(100);
    // Time is paused: it passes once the connections have ended, which only their next calls find out.
    tokio::time::sleep(enough).await;
    for _ in 0..200 {
        let mut avoid = Avoid::default();
        let call = tokio::time::timeout(enough, pool.call(&mut avoid, head)).await;
        assert_eq!(call.expect("it waits").unwrap().0.slot.number, 1);
        tokio::time::advance(enough).await;
    }
}
